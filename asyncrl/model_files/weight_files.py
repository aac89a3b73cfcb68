"""A model folder's weight files: whether they are whole, and a fingerprint of their content.

An adapter for one base is another policy on another. Architectures are compared by names, shapes and dtypes; two
revisions of one model agree in all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError, safe_open

from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError
from asyncrl.model_files.folder import model_folder

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs"
THREADS = 4
"""Threads that compute checksums; xxhash releases the interpreter's lock."""


def check_weights(config: ModelConfig) -> None:
    """Raises UserError where a weight file is absent, cut off, or a git-lfs pointer. Only headers are read."""
    folder = model_folder(config)
    files = weight_files(folder)
    if not files:
        raise UserError(
            f"{folder} has no weights (*.safetensors). Copy them from the original model; what `git clone` without "
            "git-lfs leaves is not enough"
        )
    for file in files:
        if not file.is_file():
            raise UserError(f"{folder / INDEX} names {file.name}, which is not in the folder. Download it, too")
        with file.open("rb") as opened:
            is_pointer = opened.read(len(_LFS_POINTER)) == _LFS_POINTER
        if is_pointer:
            raise UserError(
                f"{file} is a git-lfs pointer of {file.stat().st_size} bytes, not the weights. Fetch them with "
                "`git lfs pull` in the model's repository, or download the file again"
            )
        if file.suffix == ".safetensors":
            with open_weights(file):
                pass


def base_fingerprint(config: ModelConfig) -> str:
    """Fingerprint of every tensor in the folder's *.safetensors, however they are sharded: name, dtype, shape, bytes.

    Reads the files once, at the speed of the disk or of memory; nothing is loaded.
    """
    folder = model_folder(config)
    files = [file for file in weight_files(folder) if file.suffix == ".safetensors"]
    if not files:
        raise UserError(
            f"{folder} has no model.safetensors, so its weights cannot be identified. Save the model again with "
            "save_pretrained of a current transformers"
        )
    with ThreadPoolExecutor(THREADS, thread_name_prefix="xxh3") as pool:
        described = [tensor for file in files for tensor in _described(file, pool)]
    return hashlib.sha256(json.dumps(sorted(described)).encode()).hexdigest()[:32]


def _described(file: Path, pool: ThreadPoolExecutor) -> list[tuple[str, str, list[int], str]]:
    """Name, dtype, shape and checksum of each tensor of a file."""
    import torch

    with open_weights(file, "pt") as opened:

        def describe(name: str) -> tuple[str, str, list[int], str]:
            part = opened.get_slice(name)
            flat = opened.get_tensor(name).reshape(-1).view(torch.uint8).numpy()
            return name, part.get_dtype(), part.get_shape(), xxhash.xxh3_128_hexdigest(flat)

        return list(pool.map(describe, opened.keys()))


def weight_files(folder: Path) -> list[Path]:
    """Files that transformers reads: the single one, else those that the index names, else what there is."""
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


@contextmanager
def open_weights(file: Path, framework: str = "numpy") -> Iterator[Any]:
    """An open safetensors file. Raises UserError where its header and its length do not fit each other."""
    try:
        with safe_open(file, framework) as opened:
            yield opened
    except SafetensorError as error:
        raise UserError(
            f"{file} is cut off or damaged: it has {file.stat().st_size:,} bytes, and safetensors says: {error}. "
            "Download it again"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error}. Make it readable, or download it again") from None
