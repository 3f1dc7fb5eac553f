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
from torch import Tensor

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


class ParquetShard:
    """One file. The column that is asked for cell by cell is read at the first question: into memory where `small`."""

    def __init__(self, file: Path, small: bool) -> None:
        self.file, self.small = file, small
        footer = parquet_file(file)
        self.schema, self.count = footer.schema_arrow, footer.metadata.num_rows
        self._chunks: dict[str, tuple[list[Any], NDArray[np.int64]]] = {}

    def __len__(self) -> int:
        return self.count

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_chunks": {}}  # another process reads the file itself

    def folder(self, row: int) -> Path | None:
        return self.file.parent

    def name(self, row: int) -> str:
        return f"{self.file.name} row {row}"

    def contents(self, column: str) -> Iterable[bytes]:
        """Rows, size, beginning and end: at the end is the footer, with the place of every column."""
        with self.file.open("rb") as content:
            size = content.seek(0, os.SEEK_END)
            content.seek(max(0, size - BLOCK))
            yield repr((self.schema.names, len(self), size)).encode() + content.read()
        yield beginning(self.file)

    def column(self, name: str) -> list[Any]:
        return self._read(name).to_pylist()

    def cell(self, row: int, column: str) -> Any:
        if column not in self._chunks:
            read = self._read(column).chunks if self.small else mapped_column(self.file, column)
            chunks = [chunk for chunk in read if len(chunk)]
            self._chunks[column] = chunks, np.cumsum([0, *map(len, chunks)])
        chunks, starts = self._chunks[column]
        chunk = int(np.searchsorted(starts, row, side="right")) - 1
        return chunks[chunk][row - int(starts[chunk])].as_py()

    def _read(self, column: str) -> Any:
        try:
            return parquet_file(self.file).read(columns=[column]).column(column)
        except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
            raise DataError(f"{self.file}: column {column!r} cannot be read, the file is damaged: {error}") from error


def parquet_rows(files: Sequence[Path]) -> JoinedRows:
    """Shards, one after the other."""
    small = sum(file.stat().st_size for file in files) <= IN_MEMORY_BYTES
    shards = [ParquetShard(file, small) for file in files]
    names = shards[0].schema.names
    for shard in shards:
        if shard.schema.names != names:
            raise DataError(f"{shard.file}: wrong columns {shard.schema.names}, {files[0].name} has {names}")
    return JoinedRows(*shards)


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
    """Tables with the same columns, one after the other."""

    def __init__(self, *tables: Rows) -> None:
        self.tables, self.schema = tables, tables[0].schema
        self.starts = np.cumsum([0, *map(len, tables)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def folder(self, row: int) -> Path | None:
        table, row = self._at(row)
        return table.folder(row)

    def contents(self, column: str) -> Iterable[bytes]:
        return (piece for table in self.tables for piece in table.contents(column))

    def column(self, name: str) -> list[Any]:
        return [value for table in self.tables for value in table.column(name)]

    def name(self, row: int) -> str:
        table, row = self._at(row)
        return table.name(row)

    def cell(self, row: int, column: str) -> Any:
        table, row = self._at(row)
        return table.cell(row, column)

    def _at(self, row: int) -> tuple[Rows, int]:
        number = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.tables[number], row - int(self.starts[number])


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


class Encoded:
    """Encoded items with their labels."""

    def __init__(self, items: Items, labels: Tensor) -> None:
        self.items, self.labels = items, labels

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        return self.items.name(index)

    def contents(self) -> Iterable[bytes]:
        return self.items.contents()


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

    @property
    def shard_of(self) -> NDArray[np.int64]:
        """The number of the file of each item, (N,)."""
        ends = np.cumsum(lengths(self.rows))
        return np.searchsorted(ends, self.picks, side="right")


def lengths(rows: Rows) -> list[int]:
    """Rows of each file of a table."""
    if isinstance(rows, JoinedRows):
        return [count for table in rows.tables for count in lengths(table)]
    return [len(rows)]


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
