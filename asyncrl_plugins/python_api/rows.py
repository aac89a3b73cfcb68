"""Rows of a script or notebook, written as a Parquet file that the run reads as any other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from PIL import Image, ImageOps

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
        _write(_listed(table, name), name, draft)
    return [str(draft.replace(folder / f"{name}-{xxhash.xxh3_64_hexdigest(draft.read_bytes())[:8]}.parquet"))]


def _listed(rows: Iterable[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    try:
        listed = [{key: _plain(value) for key, value in row.items()} for row in rows]
    except AttributeError:
        listed = []
    if not listed:
        raise UserError(
            f"{name} has no rows: give a list of dicts such as {{'prompt': ..., 'answer': ...}}, a table of the "
            "datasets library or of pandas, or file names"
        )
    return listed


def _write(rows: Sequence[Mapping[str, Any]], name: str, file: Path) -> None:
    try:
        # pyarrow's own schema has the columns of the first row alone.
        columns = dict.fromkeys(key for row in rows for key in row)
        schema = pa.schema([(key, pa.array([row.get(key) for row in rows]).type) for key in columns])
        pq.write_table(pa.Table.from_pylist(rows, schema), file)
    except (pa.ArrowException, OverflowError) as problem:
        raise UserError(
            f"{name} cannot be a Parquet file: {problem}. Give each column values of one type: texts, numbers up to 64 "
            "bits, images, lists, and dicts with a key"
        ) from None


def _plain(value: Any) -> Any:
    """The value, with PIL's images upright as PNG, and paths as texts."""
    if isinstance(value, Image.Image):
        upright, png = ImageOps.exif_transpose(value), BytesIO()
        known = upright.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
        (upright if known else upright.convert("RGB")).save(png, "PNG")
        return png.getvalue()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value
