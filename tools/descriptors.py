"""Where tensor cores read, out of assembly for sm_90: registers that hold constants are followed from line to line.

An operand in shared memory is a descriptor of 64 bits, whose address the compiler knows where tiles are not pipelined.
Where the assembler loses one, its registers hold something else, or nothing: what the walk below finds. Where tiles are
pipelined, the address is no constant; but nothing that a kernel is given, a length or a stride, may go into it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

WORD, LONG = (1 << 32) - 1, (1 << 64) - 1
# Upper halves: rows of 128, 64 and 32 bytes, with the step from eight of them to the next, if there are more.
ROWS = {0x40000040, 0x80000020, 0xC0000010} | {0x40000000, 0x80000000, 0xC0000000}
GIVEN = 0x210  # where the arguments of a kernel begin in its bank of constants
RESERVED = 0x400  # bytes before a program's own shared memory
Pair = tuple[int | None, int | None]


def _looked_up(x: int, y: int, z: int, table: int, *_: int) -> int:
    """Three words bit by bit, by a table of eight bits."""
    found = 0
    for case in range(8):
        if table >> case & 1:
            found |= (x if case & 4 else ~x) & (y if case & 2 else ~y) & (z if case & 1 else ~z)
    return found


# Without the U of uniform registers; what is not here gives nothing known.
WORDS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(
        ("MOV", "MOV.SPILL", "R2UR", "R2UR.FILL", "SHFL.IDX", "CS2R", "CS2R.32", "S2R", "S2UR"), lambda x, *_: x
    ),
    **dict.fromkeys(
        ("IMAD", "IMAD.MOV", "IMAD.MOV.U32", "IMAD.U32", "IMAD.SHL", "IMAD.SHL.U32", "IMAD.IADD", "IMAD.X"),
        lambda x, y, z, carry=0: x * y + z + carry,
    ),
    **dict.fromkeys(("IADD3", "IADD3.X", "VIADD"), lambda *x: sum(x)),
    **dict.fromkeys(("SHF.R.U32.HI", "SHF.R.S32.HI"), lambda x, y, upper: upper >> y),
    "SHF.L.U32": lambda x, y, z: x << y,
    "SGXT.U32": lambda x, y, *_: x & ((1 << y) - 1),
    "LOP3.LUT": _looked_up,
    "LEA": lambda x, y, shift, *_: (x << shift) + y,
    "LEA.HI": lambda x, y, upper, shift: ((upper << 32 | x) << shift >> 32) + y,
}
SPECIAL = {"SR_TID.X", "SR_CgaCtaId", "SRZ"}  # as the first thread of the only cluster has them
WIDE = ("ULDC.64", "LDC.64", "UIMAD.WIDE", "IMAD.WIDE", "CS2R")


def descriptors(assembly: str) -> list[Pair]:
    """Lower and upper half of each descriptor of each product, in order; None where it is no constant."""
    return _walked(assembly).found


def _walked(assembly: str) -> _Walk:
    walk = _Walk()
    for line in assembly.splitlines():
        text = re.sub(r"\.reuse|^.*?\t|/\*.*?\*/|;.*", "", line).strip()
        if text:
            walk.step(text)
    return walk


class _Walk:
    def __init__(self) -> None:
        self.words: dict[str, int | None] = {}
        self.carries: dict[str, int | None] = {}
        self.local: dict[int, int | None] = {}
        self.given: set[str | int] = set()  # registers and places of `local` made of arguments
        self.strays = 0
        self.found: list[Pair] = []

    def word(self, name: str) -> int | None:
        bare = name.lstrip("-~")
        if bare in ("URZ", "RZ") or bare in SPECIAL:
            x: int | None = 0
        else:
            x = int(bare, 0) if re.fullmatch(r"0x[0-9a-f]+|\d+", bare) else self.words.get(bare)
        if x is None:
            return None
        return (-x if name[0] == "-" else ~x if name[0] == "~" else x) & WORD

    def long(self, name: str) -> int | None:
        bare = name.lstrip("-")
        lower, upper = self.word(bare), 0 if bare[-1] == "Z" or bare[0].isdigit() else self.word(_after(bare))
        if lower is None or upper is None:
            return None
        return (upper << 32 | lower) * (-1 if name[0] == "-" else 1)

    def step(self, text: str) -> None:
        sometimes = text[0] == "@"
        operation, _, rest = re.sub(r"^@\S+\s+", "", text).partition(" ")
        given = [x.strip() for x in re.split(r",\s*(?![^\[]*\])", rest)]
        if "gdesc[URZ]" in text:
            return  # a product of nothing, waited for in the place of one that was not needed
        if operation.startswith("HGMMA"):
            first = int(re.findall(r"gdesc\[UR(\d+)\]", text)[0])
            halves = [self.words.get(f"UR{first + i}") for i in range(4)]
            from_registers = re.match(r"R\d+, (R\d+,)", rest) is not None
            self.strays += any(f"UR{first + i}" in self.given for i in range(2 * from_registers, 4))
            self.found += [(halves[0], halves[1])] * (not from_registers) + [(halves[2], halves[3])]
            return
        if operation.startswith(("LDL", "STL")):
            self.spill(operation, *given[:2])
            return
        if operation.startswith("SHFL"):
            given = given[1:]
        if not re.fullmatch(r"U?R\d+", given[0]):
            return
        self.follow(given[0], operation, given[1:], sometimes)
        to, values = given[0], [x for x in given[1:] if not re.match(r"!?U?P(T|\d)", x)]
        carries = [x for x in given[1:] if x not in values and x[0] != "!"]
        if operation.startswith(("LDG", "LDS")):
            for name in _names(to, operation):
                self.words[name] = None
        elif operation == "UIADD3.64":
            longs = [self.long(x) for x in values]
            total = None if None in longs else sum(x for x in longs if x is not None) & LONG
            self.words[to], self.words[_after(to)] = (None, None) if total is None else (total & WORD, total >> 32)
        else:
            self.put(to, operation, values, carries, sometimes)

    def follow(self, to: str, operation: str, values: list[str], sometimes: bool) -> None:
        """Notes whether what is written is made of arguments."""
        wide = ".64" in operation or operation.startswith(WIDE)
        read = [x for value in values for x in re.findall(r"U?R\d+", value)]
        read += [_after(x) for x in read] * wide
        places = [int(x, 16) for value in values for x in re.findall(r"c\[0x0\]\[(0x\w+)\]", value)]
        made = any(x in self.given for x in read) or any(x >= GIVEN for x in places)
        for name in [to, _after(to)] if wide else [to]:
            self.note(name, made or (sometimes and name in self.given))

    def note(self, place: str | int, made: bool) -> None:
        (self.given.add if made else self.given.discard)(place)

    def put(self, to: str, operation: str, values: list[str], carries: list[str], sometimes: bool) -> None:
        known = [None if "[" in x else self.word(x) for x in values]
        made = WORDS.get(operation.removeprefix("U") if operation[:3] != "USE" else operation)
        adds, takes = operation.removeprefix("U") == "IADD3", operation.endswith(".X")
        if takes:
            known += [0 if "T" in x else self.carries.get(x) for x in carries]
        exact = None if made is None or None in known else made(*known)
        if adds and carries:
            self.carries[carries[0]] = None if exact is None else exact >> 32
        value = None if exact is None else exact & WORD
        self.words[to] = value if not sometimes or value == self.words.get(to) else None
        if operation.startswith(WIDE) and operation != "CS2R.32":
            self.words[_after(to)] = value

    def spill(self, operation: str, first: str, second: str) -> None:
        place, name = (first, second) if operation.startswith("STL") else (second, first)
        offset = re.fullmatch(r"\[R1(?:\+(0x[0-9a-f]+))?\]", place)
        for i, x in enumerate(_names(name, operation)):
            at = int(offset[1] or "0", 0) + 4 * i if offset else -1
            if operation.startswith("STL"):
                self.local[at] = self.word(x)
                self.note(at, x in self.given)
            else:
                self.words[x] = self.local.get(at)
                self.note(x, at in self.given)


def _after(name: str) -> str:
    letters, number = re.fullmatch(r"(U?R)(\d+)", name).groups()  # type: ignore[union-attr]
    return f"{letters}{int(number) + 1}"


def _names(first: str, operation: str) -> list[str]:
    """The registers that a load or store of so many bits takes."""
    names = [first]
    count = 4 if operation.endswith(("128", "M88.4")) else 2 if operation.endswith("64") else 1
    while len(names) < count and names[-1] != "RZ":
        names.append(_after(names[-1]))
    return names


def strays(assembly: str) -> int:
    """Products of which a descriptor is made of arguments of the kernel."""
    return _walked(assembly).strays


def lost(assembly: str, shared: int) -> list[Pair]:
    """Descriptors that are no constants, or of no rows that there are, or of memory behind a program's own."""
    return [
        (lower, upper) for lower, upper in descriptors(assembly)
        if lower is None or upper not in ROWS or not RESERVED <= (lower & 0x3FFF) * 16 < RESERVED + shared
    ]  # fmt: skip
