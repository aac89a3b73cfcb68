"""One file, folder or hub data set as a table of rows. Images stay as they are stored: encoded bytes or paths."""

from __future__ import annotations

import bisect
import codecs
import csv
import hashlib
import json
import os
import shlex
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from asyncrl.errors import UserError
from protocol import nesting

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
ROW_GROUP_CACHE_BYTES = 2 * 1024**3
"""Decoded Parquet row groups kept in memory, over all files of one data set."""


class Table:
    """Rows by index. `read` may be slow, never changes anything, and is not thread safe."""

    def __init__(self, name: str, base_dir: Path, columns: Iterable[str]) -> None:
        self.name = name
        self.base_dir = base_dir
        """Relative image paths start here."""
        self.columns = tuple(columns)
        """Every column that at least one row has."""
        if twice := next((column for column in self.columns if self.columns.count(column) > 1), None):
            raise UserError(f"{name} has two columns {twice!r}, of which one would be lost. Rename or drop one")

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, index: int) -> dict[str, Any]:
        raise NotImplementedError

    def column(self, name: str) -> list[Any]:
        """Values of one of `columns` in each row; None where a row has none."""
        return [self.read(index).get(name) for index in range(len(self))]

    @property
    def fingerprint(self) -> str | None:
        """Equal for the same rows, image files that they name aside; None where that cannot be told cheaply."""
        return None


class ParquetTable(Table):
    """A Parquet file; a row is read by decoding its row group, and recent row groups are kept."""

    def __init__(self, path: Path, cache: RowGroupCache) -> None:
        import pyarrow
        import pyarrow.parquet

        try:
            self._file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise UserError(f"cannot read {path} as Parquet: {error}") from None
        super().__init__(path.name, path.parent, self._file.schema_arrow.names)
        state = path.stat()
        self._identity = f"{path.resolve()} {state.st_size} {state.st_mtime_ns}"
        self._cache, metadata = cache, self._file.metadata
        self._ends = list(accumulate(metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, index: int) -> dict[str, Any]:
        group = bisect.bisect_right(self._ends, index)
        table = self._cache.get(self._file, group)
        return _rows(table.slice(index - (self._ends[group - 1] if group else 0), 1))[0]

    def column(self, name: str) -> list[Any]:
        return self._file.read(columns=[name], use_threads=False).column(0).to_pylist()

    @property
    def fingerprint(self) -> str:
        return self._identity


class RowGroupCache:
    """The most recently used decoded row groups, up to a number of bytes."""

    def __init__(self) -> None:
        self._tables: OrderedDict[tuple[Any, int], Any] = OrderedDict()
        self._bytes = 0

    def get(self, file: Any, group: int) -> Any:
        """The Arrow table of one row group of a ParquetFile."""
        key = (file, group)
        if key not in self._tables:
            self._tables[key] = file.read_row_group(group, use_threads=False)
            self._bytes += self._tables[key].nbytes
            while self._bytes > ROW_GROUP_CACHE_BYTES and len(self._tables) > 1:
                self._bytes -= self._tables.popitem(last=False)[1].nbytes
        self._tables.move_to_end(key)
        return self._tables[key]


class RowTable(Table):
    """Rows in memory, each a mapping or the JSON text of one."""

    def __init__(self, rows: Sequence[dict[str, Any] | bytes], name: str, base_dir: Path, columns: Iterable[str]):
        super().__init__(name, base_dir, columns)
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        return json.loads(row) if isinstance(row, bytes) else dict(row)

    @property
    def fingerprint(self) -> str:
        hashed = hashlib.sha256(str(self.base_dir.resolve()).encode())
        for row in self._rows:
            text = row if isinstance(row, bytes) else json.dumps(row, sort_keys=True, default=repr).encode()
            hashed.update(len(text).to_bytes(8, "little") + text)
        return hashed.hexdigest()


class HubTable(Table):
    """A data set of the `datasets` library, read as stored: no image is decoded."""

    def __init__(self, dataset: Any, name: str, base_dir: Path) -> None:
        super().__init__(name, base_dir, dataset.column_names)
        # The arrow format hands out an Image column as its struct of bytes and path, however deep it is nested.
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int) -> dict[str, Any]:
        return _rows(self._dataset[index : index + 1])[0]

    def column(self, name: str) -> list[Any]:
        return self._dataset.select_columns([name])[:].column(0).to_pylist()

    @property
    def fingerprint(self) -> str | None:
        return getattr(self._dataset, "_fingerprint", None)  # the library's own, of content and transformations


def _rows(table: Any) -> list[dict[str, Any]]:
    """Rows of an Arrow table; a map is a dict. Raises KeyError where a map has a key twice."""
    return table.to_pylist(maps_as_pydicts="strict")


def read_json(path: Path) -> Table:
    """One JSON object per line, whose text stays in memory, or one array of objects. Blank lines do not count."""
    data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if _is_wide(data):
        raise _not_utf8(path, "UTF-16")
    is_array = data.lstrip().startswith(b"[")
    rows: list[dict[str, Any] | bytes] = []
    columns: dict[str, None] = {}
    for number, piece in enumerate([data] if is_array else data.splitlines(), start=1):
        where = str(path) if is_array else f"{path} line {number}"
        if not piece.strip():
            continue
        try:
            value = nesting.read_json(piece, object_pairs_hook=_once)
        except UnicodeDecodeError:
            raise _not_utf8(path) from None
        except ValueError as error:
            raise UserError(f"{where} is not valid JSON: {error}. Write one JSON object per line") from None
        for row in value if is_array else [value]:
            if not isinstance(row, dict):
                raise UserError(f"{where} has a {type(row).__name__}: expected one JSON object per line")
            columns |= dict.fromkeys(row)
        rows += value if is_array else [piece]
    return RowTable(rows, path.name, path.parent, columns)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is given twice")
    return row


def _is_wide(data: bytes) -> bool:
    """Whether text is in UTF-16 or UTF-32, by its beginning."""
    return data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data[:4]


def _not_utf8(path: Path, encoding: str = "") -> UserError:
    found = f"in {encoding}" if encoding else "in another encoding, perhaps LATIN1"
    source, target = shlex.quote(str(path)), shlex.quote(f"{path.with_suffix('')}.utf8{path.suffix}")
    fix = f"iconv -f {encoding or 'LATIN1'} -t UTF-8 {source} > {target}"
    return UserError(f"{path} is written {found}, and data files are UTF-8. Convert it: {fix}")


def read_csv(path: Path) -> Table:
    """Rows of a CSV or TSV file, whose first line names the columns. A cell is text; an empty one is None.

    Lists, such as several images or chat messages, need another kind of file.
    """
    csv.field_size_limit(2**31 - 1)  # an image in base64 is one cell
    rows: list[dict[str, Any] | bytes] = []
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    try:
        with path.open("rb") as start:
            if _is_wide(start.read(4)):
                raise _not_utf8(path, "UTF-16")
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            _check_header(reader.fieldnames or (), delimiter, path)
            for row in reader:
                if None in row or None in row.values():
                    names = ", ".join(reader.fieldnames or ())
                    raise UserError(f"{path} line {reader.line_num} does not have one cell for each of: {names}")
                rows.append({name: cell or None for name, cell in row.items()})
    except UnicodeDecodeError:
        raise _not_utf8(path) from None
    except (OSError, csv.Error) as error:
        raise UserError(f"cannot read {path} as CSV: {error}") from None
    return RowTable(rows, path.name, path.parent, reader.fieldnames or ())


def _check_header(columns: Sequence[str], delimiter: str, path: Path) -> None:
    """Refuse a first line whose cells are separated by something else: it would be one column."""
    other = next((mark for mark in ";\t|," if mark != delimiter and mark in columns[0]), None) if columns else None
    if len(columns) != 1 or other is None:
        return
    source, target = shlex.quote(str(path)), shlex.quote(f"{path.with_suffix('')}.commas.csv")
    change = f"import csv, sys; csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter={json.dumps(other)}))"
    raise UserError(
        f"{path}: cells are separated by {delimiter!r} in a {path.suffix} file, and its first line is {columns[0]!r}, "
        f"separated by {other!r}. Convert it: python -c {shlex.quote(change)} < {source} > {target}"
    )


def read_image_folder(folder: Path, image_key: str, answer_key: str) -> Table:
    """One row per image, in the order of the paths: the image, and its parent folder's name as label and answer.

    metadata.jsonl or metadata.csv with a `file_name` column adds columns (and may set the answer).
    """
    metadata = _metadata(folder)
    rows = []
    for path in sorted(images_below(folder)):
        relative = path.relative_to(folder).as_posix()
        label = path.parent.name
        rows.append({"label": label, answer_key: label, **metadata.pop(relative, {}), image_key: [relative]})
    if metadata:
        raise UserError(f"the metadata in {folder} has a file_name that is not there: {next(iter(metadata))!r}")
    name = folder.name or str(folder.resolve())
    return RowTable(rows, name, folder, dict.fromkeys(column for row in rows for column in row))


def images_below(folder: Path) -> Iterator[Path]:
    for parent, _, files in os.walk(folder):
        yield from (Path(parent, name) for name in files if name.lower().endswith(IMAGE_SUFFIXES))


def _metadata(folder: Path) -> dict[str, dict[str, Any]]:
    """Rows of metadata.jsonl, else of metadata.csv, by the image's path below the folder."""
    file = next((folder / name for name in ("metadata.jsonl", "metadata.csv") if (folder / name).exists()), None)
    if file is None:
        return {}
    table = read_csv(file) if file.suffix == ".csv" else read_json(file)
    rows = [table.read(index) for index in range(len(table))]
    metadata = {Path(str(row.pop("file_name", None) or "")).as_posix(): row for row in rows}
    if len(metadata) < len(rows):
        raise UserError(f"{file} has a row without file_name, or two rows with the same one")
    return metadata
