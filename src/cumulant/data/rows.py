"""Encoded items, random access: files of a folder, and rows of parquet shards (plain pyarrow) or of the Hub."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..optional import needed
from .identity import BLOCK, SAMPLES, beginning, file_contents
from .part import DataError, DecodeError, spread

IN_MEMORY_BYTES = 1 << 30
"""Parquet up to this size is held encoded in memory; larger sets get a memory-mapped Arrow copy in the cache."""


class Rows(Protocol):
    """A table. `schema` is a pyarrow schema; rows are numbered from 0."""

    schema: Any

    def __len__(self) -> int: ...

    def name(self, row: int) -> str: ...

    def column(self, name: str) -> list[Any]:
        """A whole (small) column as Python values."""
        ...

    def cell(self, row: int, column: str) -> Any: ...

    def folder(self, row: int) -> Path | None:
        """What a relative path in this row refers to."""
        ...

    def contents(self, column: str) -> Iterable[bytes]:
        """What tells the table, and that column of it, from others; without reading it all."""
        ...


class ParquetRows:
    """Shards, one after the other. The column that is asked for cell by cell is read at the first question."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        footers = [parquet_file(file) for file in self.files]
        self.schema = footers[0].schema_arrow
        for file, footer in zip(self.files, footers, strict=True):
            if footer.schema_arrow.names != self.schema.names:
                raise DataError(
                    f"{file}: wrong columns {footer.schema_arrow.names}, {self.files[0].name} has {self.schema.names}"
                )
        self.starts = np.cumsum([0, *(footer.metadata.num_rows for footer in footers)])
        self._chunks: dict[str, tuple[list[Any], np.ndarray]] = {}

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_chunks": {}}  # another process reads the files itself

    def folder(self, row: int) -> Path | None:
        return self.files[self._shard(row)].parent

    def contents(self, column: str) -> Iterable[bytes]:
        """Rows, size, beginning and end of every shard: at the end is the footer, with the place of every column."""
        yield repr((self.schema.names, self.starts.tolist())).encode()
        for file in self.files:
            with file.open("rb") as content:
                size = content.seek(0, os.SEEK_END)
                content.seek(max(0, size - BLOCK))
                yield b"%d " % size + content.read()
            yield beginning(file)

    def name(self, row: int) -> str:
        shard = self._shard(row)
        return f"{self.files[shard].name} row {row - int(self.starts[shard])}"

    def _shard(self, row: int) -> int:
        return int(np.searchsorted(self.starts, row, side="right")) - 1

    def column(self, name: str) -> list[Any]:
        return [value for file in self.files for value in self._read(file, name).to_pylist()]

    def cell(self, row: int, column: str) -> Any:
        if column not in self._chunks:
            self._chunks[column] = self._load(column)
        chunks, starts = self._chunks[column]
        chunk = int(np.searchsorted(starts, row, side="right")) - 1
        return chunks[chunk][row - int(starts[chunk])].as_py()

    def _load(self, column: str) -> tuple[list[Any], np.ndarray]:
        small = sum(file.stat().st_size for file in self.files) <= IN_MEMORY_BYTES
        parts = [self._read(file, column).chunks if small else mapped_column(file, column) for file in self.files]
        chunks = [chunk for part in parts for chunk in part if len(chunk)]
        return chunks, np.cumsum([0, *(len(chunk) for chunk in chunks)])

    def _read(self, file: Path, column: str) -> Any:
        try:
            return parquet_file(file).read(columns=[column]).column(column)
        except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
            raise DataError(f"{file}: column {column!r} cannot be read, the file is damaged: {error}") from error


class HubRows:
    """A `datasets.Dataset`, read through its Arrow table so that nothing is decoded twice."""

    def __init__(self, dataset: Any, title: str) -> None:
        self.dataset, self.title = dataset, title
        self.schema = dataset.features.arrow_schema
        self._views: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": {}}

    def folder(self, row: int) -> Path | None:
        return None

    def contents(self, column: str) -> Iterable[bytes]:
        yield repr((self.schema.names, len(self))).encode()
        for row in spread(len(self), SAMPLES):
            cell = self.cell(row, column)
            with suppress(DecodeError, IndexError):  # a row without pixels
                content = encoded(cell[0] if isinstance(cell, list) else cell, None, self.name(row))
                yield beginning(content) if isinstance(content, Path) else content[:BLOCK]

    def name(self, row: int) -> str:
        return f"{self.title} row {row}"

    def column(self, name: str) -> list[Any]:
        return self._view(name)[:].column(name).to_pylist()

    def cell(self, row: int, column: str) -> Any:
        return self._view(column)[int(row)].column(column)[0].as_py()

    def _view(self, column: str) -> Any:
        if column not in self._views:
            self._views[column] = self.dataset.select_columns([column]).with_format("arrow")
        return self._views[column]


class JoinedRows:
    """Two tables with the same columns, one after the other."""

    def __init__(self, first: Rows, second: Rows) -> None:
        self.first, self.second, self.schema = first, second, first.schema

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def folder(self, row: int) -> Path | None:
        return self.first.folder(row) if row < len(self.first) else self.second.folder(row - len(self.first))

    def contents(self, column: str) -> Iterable[bytes]:
        return (*self.first.contents(column), *self.second.contents(column))

    def column(self, name: str) -> list[Any]:
        return self.first.column(name) + self.second.column(name)

    def name(self, row: int) -> str:
        return self.first.name(row) if row < len(self.first) else self.second.name(row - len(self.first))

    def cell(self, row: int, column: str) -> Any:
        return (
            self.first.cell(row, column) if row < len(self.first) else self.second.cell(row - len(self.first), column)
        )


class Items(Protocol):
    """Encoded images or videos: what a part decodes."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str: ...

    def encoded(self, index: int) -> bytes | Path:
        """The bytes of an item, or its file; raises DecodeError."""
        ...

    def contents(self) -> Iterable[bytes]:
        """What tells these items from others, see `identity`."""
        ...


class Files:
    """One file an item; `files` are relative to `folder`."""

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        self.folder, self.files = folder, list(files)

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        return str(self.folder / self.files[index])

    def encoded(self, index: int) -> Path:
        return self.folder / self.files[index]

    def contents(self) -> Iterable[bytes]:
        return file_contents(self.folder, self.files)


class Cells:
    """One cell of a column an item; `picks` are the rows that take part."""

    def __init__(self, rows: Rows, picks: NDArray[np.int64], column: str) -> None:
        self.rows, self.picks, self.column = rows, picks, column

    def __len__(self) -> int:
        return len(self.picks)

    def name(self, index: int) -> str:
        return self.rows.name(int(self.picks[index]))

    def encoded(self, index: int) -> bytes | Path:
        row = int(self.picks[index])
        return encoded(self.rows.cell(row, self.column), self.rows.folder(row), self.rows.name(row))

    def contents(self) -> Iterable[bytes]:
        return (self.picks.tobytes(), *self.rows.contents(self.column))


def encoded(cell: Any, folder: Path | None, name: str) -> bytes | Path:
    """The bytes of an image or video cell (binary, or struct of bytes and path), or the file it points to."""
    content, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
    if content:
        return content
    if path:
        return folder / path if folder is not None else Path(path)
    raise DecodeError(name, "neither bytes nor a path in this row")


def parquet_file(file: Path) -> Any:
    with needed("reading parquet needs pyarrow", "data"):
        import pyarrow.parquet as parquet
    try:
        return parquet.ParquetFile(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: not a parquet file, or cut short: {error}") from error


def mapped_column(file: Path, column: str) -> list[Any]:
    """The column as Arrow arrays over a memory-mapped copy, written once: all processes share its pages.

    Parquet has no random access within a row group, so that shuffled reading would decompress a group an item.
    """
    import pyarrow

    status = file.stat()
    key = f"{file.resolve()}:{status.st_size}:{status.st_mtime_ns}:{column}"
    copy = cache_folder() / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.arrow"
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        partial = copy.with_suffix(f".{os.getpid()}.partial")
        source = parquet_file(file)
        try:
            with pyarrow.ipc.new_file(partial, pyarrow.schema([source.schema_arrow.field(column)])) as sink:
                for batch in source.iter_batches(batch_size=256, columns=[column]):
                    sink.write_batch(batch)
            partial.replace(copy)
        except (OSError, ValueError) as error:
            raise DataError(f"{file}: no memory-mapped copy could be written to {copy}: {error}") from error
        finally:
            partial.unlink(missing_ok=True)
    batches = pyarrow.ipc.open_file(pyarrow.memory_map(str(copy)))
    return [batches.get_batch(i).column(0) for i in range(batches.num_record_batches)]


def cache_folder() -> Path:
    """$CUMULANT_CACHE, else the user's cache folder."""
    chosen = os.environ.get("CUMULANT_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cumulant"
