"""One file, folder or hub data set as a table of rows. Images stay as they are stored: encoded bytes or paths."""

from __future__ import annotations

import bisect
import csv
import json
import logging
import os
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from asyncrl.errors import UserError

logger = logging.getLogger(__name__)

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
ROW_GROUP_CACHE_BYTES = 2 * 1024**3
"""Decoded Parquet row groups kept in memory, over all files of one data set."""


class Table(Protocol):
    """Rows by index. `read` may be slow, never changes anything, and is not thread safe."""

    name: str
    base_dir: Path
    """Relative image paths start here."""
    columns: tuple[str, ...]
    """Every column that at least one row has."""

    def __len__(self) -> int: ...
    def read(self, index: int) -> dict[str, Any]: ...
    def first_without(self, column: str) -> int | None:
        """Index of the first row that lacks the column; None if every row has it."""
        return None if column in self.columns else 0


class ParquetTable(Table):
    """A Parquet file; a row is read by decoding its row group, and recent row groups are kept."""

    def __init__(self, path: Path, cache: RowGroupCache) -> None:
        import pyarrow
        import pyarrow.parquet

        self.name, self.base_dir, self._cache = path.name, path.parent, cache
        try:
            self._file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise UserError(f"cannot read {path} as Parquet: {error}") from None
        metadata = self._file.metadata
        self.columns = tuple(self._file.schema_arrow.names)
        self._ends = list(accumulate(metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, index: int) -> dict[str, Any]:
        group = bisect.bisect_right(self._ends, index)
        table = self._cache.get(self._file, group)
        return table.slice(index - (self._ends[group - 1] if group else 0), 1).to_pylist()[0]


class RowGroupCache:
    """The most recently used decoded row groups, up to a number of bytes."""

    def __init__(self, max_bytes: int = ROW_GROUP_CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._tables: OrderedDict[tuple[Any, int], Any] = OrderedDict()
        self._bytes = 0
        self._has_warned = False

    def get(self, file: Any, group: int) -> Any:
        """The Arrow table of one row group of a ParquetFile."""
        key = (file, group)
        if key not in self._tables:
            self._tables[key] = file.read_row_group(group, use_threads=False)
            self._bytes += self._tables[key].nbytes
            while self._bytes > self._max_bytes and len(self._tables) > 1:
                self._bytes -= self._tables.popitem(last=False)[1].nbytes
                if not self._has_warned:
                    self._has_warned = True
                    logger.warning(
                        "the Parquet files unpack to more than the %d MiB kept in memory, so reading in random order "
                        "decodes a row group per row: write them with smaller row groups (row_group_size=100)",
                        self._max_bytes // 2**20,
                    )
        self._tables.move_to_end(key)
        return self._tables[key]


class JsonLinesTable(Table):
    """A file of one JSON object per line, of which only byte offsets stay in memory. Blank lines do not count."""

    def __init__(self, path: Path) -> None:
        self.name, self.base_dir, self._path = path.name, path.parent, path
        self._offsets = array("Q")
        self._without: dict[str, int | None] = {}
        self._file = path.open("rb")
        weakref.finalize(self, self._file.close)
        offset = 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                self._note_columns(self._parse(line, number))
                self._offsets.append(offset)
            offset += len(line)
        self.columns = tuple(self._without)

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(
                f"{self._path} line {number} is not valid JSON: {error}. One JSON object per line"
            ) from None
        if not isinstance(row, dict):
            raise UserError(f"{self._path} line {number} is a {type(row).__name__}: expected one JSON object per line")
        return row

    def _note_columns(self, row: dict[str, Any]) -> None:
        index = len(self._offsets)
        for column in row.keys() - self._without.keys():
            self._without[column] = 0 if index else None
        for column in self._without.keys() - row.keys():
            if self._without[column] is None:
                self._without[column] = index

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, index: int) -> dict[str, Any]:
        self._file.seek(self._offsets[index])
        line = self._file.readline()
        try:
            return json.loads(line)
        except ValueError as error:
            raise UserError(
                f"{self._path} changed while it was in use: row {index} is no longer JSON ({error})"
            ) from None

    def first_without(self, column: str) -> int | None:
        return self._without.get(column, 0)


class ListTable(Table):
    """A table of rows in memory."""

    def __init__(self, rows: list[dict[str, Any]], name: str, base_dir: Path) -> None:
        self.name, self.base_dir, self._rows = name, base_dir, rows
        self.columns = tuple(dict.fromkeys(column for row in rows for column in row))

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> dict[str, Any]:
        return dict(self._rows[index])

    def first_without(self, column: str) -> int | None:
        return next((i for i, row in enumerate(self._rows) if column not in row), None)


class HubTable(Table):
    """A data set of the `datasets` library, read as stored: no image is decoded."""

    def __init__(self, dataset: Any, name: str, base_dir: Path) -> None:
        self.name, self.base_dir = name, base_dir
        # The arrow format hands out an Image column as its struct of bytes and path, however deep it is nested.
        self._dataset = dataset.with_format("arrow")
        self.columns = tuple(dataset.column_names)

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int) -> dict[str, Any]:
        return self._dataset[index : index + 1].to_pylist()[0]


def read_json(path: Path) -> Table:
    """A .json file: one array of objects, or JSON lines."""
    with path.open("rb") as file:
        if file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] != b"[":
            return JsonLinesTable(path)
    try:
        rows = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    wrong = next((i for i, row in enumerate(rows) if not isinstance(row, dict)), None)
    if wrong is not None:
        raise UserError(f"{path} item {wrong} is a {type(rows[wrong]).__name__}: expected an array of objects")
    return ListTable(rows, path.name, path.parent)


def read_image_folder(folder: Path, image_key: str, answer_key: str) -> Table:
    """One row per image, in the order of the paths: the image, and its parent folder's name as label and answer.

    metadata.jsonl or metadata.csv with a `file_name` column adds columns (and may set the answer).
    """
    metadata = _metadata(folder)
    rows = []
    for path in sorted(_images_below(folder)):
        relative = path.relative_to(folder).as_posix()
        label = path.parent.name
        rows.append({"label": label, answer_key: label, **metadata.pop(relative, {}), image_key: [relative]})
    if metadata:
        raise UserError(
            f"the metadata in {folder} names {next(iter(metadata))!r}, which is not there. Mend its file_name"
        )
    return ListTable(rows, folder.name or str(folder.resolve()), folder)


def has_images(folder: Path) -> bool:
    return next(_images_below(folder), None) is not None


def _images_below(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in files:
            if name.lower().endswith(IMAGE_SUFFIXES):
                yield Path(parent) / name


def _metadata(folder: Path) -> dict[str, dict[str, Any]]:
    """Rows of metadata.jsonl, else of metadata.csv, by the image's path below the folder."""
    metadata: dict[str, dict[str, Any]] = {}
    file = folder / "metadata.jsonl"
    if file.exists():
        table = JsonLinesTable(file)
        rows = [table.read(number) for number in range(len(table))]
    elif (file := folder / "metadata.csv").exists():
        rows = list(csv.DictReader(file.read_text(encoding="utf-8-sig").splitlines(keepends=True)))
    else:
        return metadata
    for number, row in enumerate(rows):
        name = row.pop("file_name", None)
        if not name or not isinstance(name, str):
            raise UserError(f"{file} has no file_name in row {number}. It names the image of the row")
        if Path(name).as_posix() in metadata:
            raise UserError(f"{file} has two rows for {name!r}. Keep one")
        metadata[Path(name).as_posix()] = row
    return metadata
