"""Are a model's weight files whole? By their headers and lengths: the weights themselves are not read."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from asyncrl.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs"
_LARGEST_HEADER = 100_000_000
"""Bytes, of the safetensors format."""


def check_weight_files(folder: Path) -> None:
    """Raises UserError where one of those that transformers reads is absent, cut off, or a git-lfs pointer."""
    for file in _weight_files(folder):
        if not file.is_file():
            raise UserError(f"{folder / INDEX} names {file.name}, which is not in the folder. Download it, too")
        try:
            _check_file(file)
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}. Make it readable, or download it again") from None


def _weight_files(folder: Path) -> list[Path]:
    """The single file, else what the index names, else whatever there is."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        return sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [folder / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index} is no index of weights ({type(error).__name__}: {error}). Download it again"
        ) from None


def _check_file(file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(max(8, len(_LFS_POINTER)))
        if start == _LFS_POINTER:
            raise UserError(
                f"{file} is a git-lfs pointer of {size} bytes, not the weights. Fetch them with `git lfs pull` in the "
                "model's repository, or download the file again"
            )
        if file.suffix != ".safetensors":
            return
        opened.seek(8)
        (length,) = struct.unpack("<Q", start[:8]) if len(start) >= 8 else (0,)
        header = opened.read(length) if length <= _LARGEST_HEADER else b""
    if size < 8 or (length <= _LARGEST_HEADER and len(header) < length):
        whole = f"its header alone has {length:,}" if size >= 8 else "a header's length alone has 8"
        raise UserError(f"{file} is cut off: it has {size:,} bytes, and {whole}. Download it again")
    try:
        ends = [tensor["data_offsets"][1] for name, tensor in json.loads(header).items() if name != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise UserError(f"{file} has no header of a safetensors file. Download it again") from None
    if size != whole:
        what = "is cut off" if size < whole else "is too long"
        raise UserError(f"{file} {what}: it has {size:,} bytes of {whole:,}. Download it again")
