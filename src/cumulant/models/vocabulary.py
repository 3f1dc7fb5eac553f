"""Texts as numbers: characters of a list, or the bytes of UTF-8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BYTES = 256


@dataclass(frozen=True)
class Vocabulary:
    """`symbols`: the characters that have a number, in order; none of them: bytes, 256 numbers for any text."""

    symbols: str = ""

    @classmethod
    def of(cls, text: str, tokens: str) -> Vocabulary:
        """For a text: its characters, sorted, or bytes."""
        if tokens not in ("chars", "bytes"):
            raise ValueError(f'tokens must be "chars" or "bytes", got {tokens!r}')
        return cls("".join(sorted(set(text)))) if tokens == "chars" else cls()

    def __len__(self) -> int:
        return len(self.symbols) or BYTES

    @property
    def names(self) -> tuple[str, ...]:
        """One for each number."""
        return tuple(self.symbols) or tuple(f"{number:#04x}" for number in range(BYTES))

    def encode(self, text: str) -> list[int]:
        """The numbers of a text; a character that has none is named."""
        if not self.symbols:
            return list(text.encode())
        numbers = {symbol: number for number, symbol in enumerate(self.symbols)}
        unknown = sorted(set(text) - numbers.keys())
        if unknown:
            raise ValueError(
                f"text has {unknown[0]!r}, which is not among the {len(self)} characters of the vocabulary: "
                f"{self.symbols[:80]!r}"
            )
        return [numbers[symbol] for symbol in text]

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of numbers; bytes that are no UTF-8 show as a replacement mark."""
        if not self.symbols:
            return bytes(numbers).decode(errors="replace")
        return "".join(self.symbols[number] for number in numbers)
