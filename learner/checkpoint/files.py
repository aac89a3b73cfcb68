"""Are the files of a checkpoint those that were written? Weights with a flipped bit load without a word."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from asyncrl.errors import BadStateError

CHECKSUMS_FILE = "checksums.json"
_READ_BYTES = 1 << 22


def write_checksums(folder: Path) -> None:
    """Of all files in the folder, by their paths in it."""
    (folder / CHECKSUMS_FILE).write_text(json.dumps({name: _checksum(folder / name) for name in _names(folder)}))


def check_files(folder: Path) -> None:
    """Raises BadStateError naming the first file that is missing or is not what was written."""
    try:
        expected = json.loads((folder / CHECKSUMS_FILE).read_text())
        for name, checksum in expected.items():
            if _checksum(folder / name) != checksum:
                raise ValueError(f"{name} is not what was written (checksum)")
        unknown = sorted(set(_names(folder)) - expected.keys())
        if unknown:
            raise ValueError(f"{unknown[0]} does not belong there")
    except (OSError, ValueError, AttributeError) as problem:
        raise BadStateError(
            f"the checkpoint {folder} cannot be used: {problem}. Restore it from a backup, or start a new run from "
            "an older one's model (asyncrl export RUN TARGET --checkpoint STEP, then model.path=TARGET)"
        ) from problem


def _names(folder: Path) -> list[str]:
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != CHECKSUMS_FILE)


def _checksum(file: Path) -> str:
    hashed = xxhash.xxh3_64()
    with file.open("rb") as opened:
        while data := opened.read(_READ_BYTES):
            hashed.update(data)
    return hashed.hexdigest()
