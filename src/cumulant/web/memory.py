"""What was computed and may be asked for again, up to so many bytes; what was not used for longest goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Memory(Generic[Value]):
    """A bounded map. The newest value is kept even where it alone is larger than `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self._kept: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Value | None:
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: Hashable, value: Value, size: int) -> None:
        with self._lock:
            if key in self._kept:
                self.size -= self._kept.pop(key)[1]
            self._kept[key] = value, size
            self.size += size
            while self.size > self.limit and len(self._kept) > 1:
                self.size -= self._kept.popitem(last=False)[1][1]

    def __len__(self) -> int:
        return len(self._kept)
