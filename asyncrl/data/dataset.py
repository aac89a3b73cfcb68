"""Open what `data.train_files` and `data.val_files` name, as one sequence of rows with checked columns."""

from __future__ import annotations

import bisect
import glob
import logging
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from asyncrl.config.sections import DataConfig, Purpose
from asyncrl.data.chat import unpacked
from asyncrl.data.images import is_inline
from asyncrl.data.tables import (
    HubTable,
    ParquetTable,
    RowGroupCache,
    Table,
    images_below,
    read_csv,
    read_image_folder,
    read_json,
)
from asyncrl.errors import UserError, close_names, file_hint

logger = logging.getLogger(__name__)


def open_dataset(source: Sequence[str], config: DataConfig, *, limit: int = 0, purpose: Purpose = "rl") -> RowSource:
    """Rows of one or several files, concatenated. `limit` keeps only the first rows; 0 means all.

    A source is a Parquet, JSONL, JSON, CSV or TSV file (or a pattern such as `data/*.parquet`), an image folder, a
    folder saved by the `datasets` library (`folder@split` if it has splits), or `org/name@split` from the hub.
    """
    cache = RowGroupCache()
    tables = [table for name in source if name for table in _open_tables(name, config, cache)]
    if not tables:
        raise UserError("no data file is named: set data.train_files")
    rows = RowSource(tables, config, limit, purpose)
    if not len(rows):
        raise UserError(f"{', '.join(source)}: there are no rows in it")
    _check_columns(tables, config, purpose)
    return rows


def open_train(config: DataConfig, purpose: Purpose = "rl") -> RowSource:
    return open_dataset(config.train_files, config, limit=config.max_train_rows, purpose=purpose)


def open_validation(config: DataConfig, purpose: Purpose = "rl") -> RowSource | None:
    """None if data.val_files is empty."""
    if not config.val_files:
        return None
    return open_dataset(config.val_files, config, limit=config.max_val_rows, purpose=purpose)


class RowSource:
    """A sequence of rows (plain dicts). Images are paths made absolute, or encoded bytes; nothing is decoded. Those in
    the parts of messages are in the column of images, as `unpacked` puts them.

    Rows are read when asked for, one thread at a time.
    """

    def __init__(
        self, tables: Sequence[Table], config: DataConfig, limit: int = 0, purpose: Purpose = "environment"
    ) -> None:
        self.purpose = purpose
        self._tables = tables
        self._config = config
        self._media_keys = (config.image_key, config.video_key)
        self._image_dir = config.image_dir
        self._ends = list(accumulate(len(table) for table in tables))
        total = self._ends[-1] if self._ends else 0
        self._length = min(limit, total) if limit else total
        self.columns = tuple(dict.fromkeys(column for table in tables for column in table.columns))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        table, place = self._find(index)
        row = unpacked(table.read(place), self._config)
        base = Path(self._image_dir) if self._image_dir else table.base_dir
        for key in self._media_keys:
            if row.get(key) is not None:
                row[key] = _absolute(row[key], base)
        return row

    def column(self, name: str) -> list[Any]:
        """The column's value in each row; None where a row has none. Raises UserError where no row has it."""
        if name not in self.columns:
            raise UserError(f"no row has a column {name!r}. Columns: {', '.join(self.columns)}")
        columns = (table.column(name) if name in table.columns else [None] * len(table) for table in self._tables)
        return [value for column in columns for value in column][: self._length]

    def row_id(self, index: int) -> str:
        """`<file or data set>:<index in it>`"""
        table, place = self._find(index)
        return f"{table.name}:{place}"

    @property
    def fingerprint(self) -> str | None:
        """Equal for the same rows, image files that they name aside; None where that cannot be told cheaply."""
        tables = [(table.name, table.fingerprint) for table in self._tables]
        if any(fingerprint is None for _, fingerprint in tables):
            return None
        return repr((tables, str(Path(self._image_dir).absolute()), self._length))

    def files_shared_with(self, other: RowSource) -> list[str]:
        """Names of files that are in both, as the same bytes in the same folder or as one path."""
        pairs = ((mine, its) for mine in self._tables for its in other._tables if len(mine) == len(its))
        return [mine.name for mine, its in pairs if mine.fingerprint and mine.fingerprint == its.fingerprint]

    def places_of(self, row_id: str) -> list[int]:
        """Indices of the rows with this id: several where files of one name lie in several folders."""
        name, _, place = row_id.rpartition(":")
        starts = zip(self._tables, [0, *self._ends], strict=False)
        found = [start + int(place) for table, start in starts if table.name == name and int(place) < len(table)]
        return [index for index in found if index < self._length]

    def _find(self, index: int) -> tuple[Table, int]:
        if not 0 <= index < self._length:
            raise IndexError(f"row {index} of {self._length}")
        number = bisect.bisect_right(self._ends, index)
        return self._tables[number], index - (self._ends[number - 1] if number else 0)


def _absolute(value: Any, base: Path) -> Any:
    """The value with image paths, at any depth, made absolute below `base`."""
    if isinstance(value, str):
        value = value.removeprefix("file://")
        return value if not value or "://" in value or is_inline(value) else str((base / value).absolute())
    if isinstance(value, list | tuple):
        return [_absolute(one, base) for one in value]
    if isinstance(value, dict) and value.get("bytes") is None and value.get("path"):
        return {**value, "path": _absolute(value["path"], base)}
    return value


def _open_tables(name: str, config: DataConfig, cache: RowGroupCache) -> list[Table]:
    path = Path(name)
    if _is_saved(path):
        return [_open_hub(name, "")]
    if path.is_dir():
        if next(images_below(path), None) is None:
            raise UserError(
                f"the folder {path} has no images and was not saved by the `datasets` library. "
                f"For data files name them, such as {path}/*.parquet"
            )
        return [read_image_folder(path, config.image_key, config.answer_key)]
    files = [path] if path.is_file() else sorted(file for file in map(Path, glob.glob(name)) if file.is_file())
    if files:
        return [_open_file(file, cache) for file in files]
    repository, at, split = name.rpartition("@")
    if at:
        return [_open_hub(repository, split)]
    raise UserError(f"there is no data file {name}: {file_hint(path)} A data set of the hub is written org/name@split")


def _open_file(path: Path, cache: RowGroupCache) -> Table:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return ParquetTable(path, cache)
    if suffix in (".jsonl", ".ndjson", ".json"):
        return read_json(path)
    if suffix in (".csv", ".tsv"):
        return read_csv(path)
    raise UserError(
        f"{path}: data files are .parquet, .jsonl, .json, .csv or .tsv, not {suffix or 'without an ending'}"
    )


def _is_saved(path: Path) -> bool:
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _open_hub(name: str, split: str) -> Table:
    """A data set of the hub, a clone of one, or a folder written by `save_to_disk`."""
    import datasets
    from datasets.config import HF_HUB_OFFLINE
    from datasets.exceptions import DatasetsError

    folder = Path(name)
    try:
        if _is_saved(folder):
            loaded: Any = datasets.load_from_disk(name)
            loaded = loaded[split] if split else loaded
        else:
            loaded = datasets.load_dataset(name, split=split)
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        fix = "Check name, split and network"
        if HF_HUB_OFFLINE and isinstance(error, ConnectionError):
            fix = "HF_HUB_OFFLINE forbids downloads: set it to 0 (or HF_DATASETS_OFFLINE)"
        raise UserError(
            f"the `datasets` library cannot load {name} (split {split!r}): {type(error).__name__}: {error}. {fix}, "
            "or name files of its columns, or a folder that `save_to_disk` has written"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        raise UserError(f"{name} has several splits: write {name}@SPLIT with one of {sorted(map(str, loaded))}")
    short = folder.name if folder.is_dir() else name
    return HubTable(loaded, f"{short}@{split}" if split else short, folder if folder.is_dir() else Path())


def _check_columns(tables: Sequence[Table], config: DataConfig, purpose: Purpose) -> None:
    # With a template the question may be made of other columns; it names what it misses.
    needed = [] if config.format_prompt else ["prompt_key"]
    needed += {"rl": ["answer_key"] if config.answer_key else [], "sft": ["target_key"], "environment": []}[purpose]
    problems = []
    for table in tables:
        for key in needed:
            column = getattr(config, key)
            if column not in table.columns:
                problems.append(
                    f"{table.name} has no column {column!r} (data.{key}). {_columns(table.columns, column, key)}"
                )
    columns = sorted({column for table in tables for column in table.columns})
    for key in ("image_key", "video_key"):
        # A missing column of images or videos must be no wrong name: rows without one have no images or videos.
        name = getattr(config, key)
        if not name or name in columns:
            continue
        if name != DataConfig.model_fields[key].default:
            problems.append(f"no row has a column {name!r} (data.{key}). {_columns(columns, name, key)}")
        elif close := close_names(name, columns):
            warning = "no row has a column %r, so all rows are without %s. If %r holds them, set data.%s"
            logger.warning(warning, name, name, close[0], key)
    if problems:
        raise UserError("\n".join(problems))


def _columns(columns: Sequence[str], wanted: str, key: str) -> str:
    close = close_names(wanted, columns)
    meant = f"Did you mean data.{key}={close[0]}? " if close else f"Set data.{key} to one of them. "
    none = "Where no reward needs one set data.answer_key= (nothing). " if key == "answer_key" else ""
    return f"{meant}{none}Columns: {', '.join(columns)}"
