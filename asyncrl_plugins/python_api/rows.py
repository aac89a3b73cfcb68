"""Rows of a script or notebook, written as a Parquet file that the run reads as any other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from PIL import Image

from asyncrl.errors import UserError


def files_of(data: Any, folder: Path, name: str) -> list[str]:
    """Return the files of a path, of paths, of a list of dicts, or of a table of `datasets` or pandas; what is no file
    is written into the folder, under a name with its hash. Images may be PIL's. Raises UserError."""
    if isinstance(data, str | Path):
        return [str(data)]
    if isinstance(data, list | tuple) and data and all(isinstance(item, str | Path) for item in data):
        return list(map(str, data))
    table: Any = data
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{name}.parquet"
    if hasattr(table, "to_parquet") and hasattr(table, "features"):  # of `datasets`: images stay as they are encoded
        table.to_parquet(draft)
    else:
        if hasattr(table, "notna"):  # of pandas, whose mark of a missing value is a number
            table = table.astype(object).where(table.notna(), None).to_dict("records")
        pq.write_table(_table(table, name), draft)
    return [str(draft.replace(folder / f"{name}-{xxhash.xxh3_64_hexdigest(draft.read_bytes())[:8]}.parquet"))]


def _table(rows: Iterable[Mapping[str, Any]], name: str) -> pa.Table:
    try:
        listed = [{key: _plain(value) for key, value in row.items()} for row in rows]
    except AttributeError:
        listed = []
    if not listed:
        raise UserError(
            f"{name} has no rows: give a list of dicts such as {{'prompt': ..., 'answer': ...}}, a table of the "
            "datasets library or of pandas, or file names"
        )
    try:
        return pa.Table.from_pylist(listed, _schema(listed))
    except pa.ArrowException as problem:
        raise UserError(f"{name}: rows differ in the type of a column: {problem}. Give each column one type") from None


def _schema(rows: Sequence[Mapping[str, Any]]) -> pa.Schema:
    """Schema of all columns: pyarrow's own has those of the first row alone."""
    columns = dict.fromkeys(key for row in rows for key in row)
    return pa.schema([(key, pa.array([row.get(key) for row in rows]).type) for key in columns])


def _plain(value: Any) -> Any:
    """The value, with PIL's images as PNG."""
    if isinstance(value, Image.Image):
        png = BytesIO()
        value.save(png, "PNG")
        return png.getvalue()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value
