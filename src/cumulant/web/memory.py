"""What was computed and may be asked for again, up to so many bytes; what was not used for longest goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Memory(Generic[Value]):
    """A bounded map. The newest value is kept even where it alone is larger than `limit`, by the size of each."""

    def __init__(self, limit: int, size: Callable[[Value], int]) -> None:
        self.limit, self._size_of, self._size = limit, size, 0
        self._kept: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Value | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: Hashable, value: Value) -> None:
        """Keep a value under a key that has none."""
        with self._lock:
            self._kept[key] = value
            self._size += self._size_of(value)
            while self._size > self.limit and len(self._kept) > 1:
                self._size -= self._size_of(self._kept.popitem(last=False)[1])

    def made(self, key: Hashable, lock: threading.Lock, make: Callable[[], Value]) -> Value:
        """The value of a key, made by whoever asks first; others wait at the lock."""
        found = self.get(key)
        if found is None:
            with lock:
                found = self.get(key)
                if found is None:
                    found = make()
                    self.put(key, found)
        return found

    def __len__(self) -> int:
        return len(self._kept)
