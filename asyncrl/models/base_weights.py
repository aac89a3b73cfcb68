"""Which base weights a folder holds, by content: an adapter for one base is another policy on another.

Architectures are compared by names, shapes and dtypes; two revisions of one model agree in all of them.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from asyncrl.config.model import ModelConfig
from asyncrl.errors import UserError
from asyncrl.models.folder import model_folder

THREADS = 4
"""That compute checksums; xxhash lets other threads run meanwhile."""


def base_fingerprint(config: ModelConfig) -> str:
    """Of every tensor in the folder's *.safetensors: name, dtype, shape and bytes, however they are sharded.

    Reads the files once, at the speed of the disk or of memory; nothing is loaded.
    """
    described: list[tuple[str, str, list[int], str]] = []
    with ThreadPoolExecutor(THREADS, thread_name_prefix="xxh3") as pool:
        for file in _weight_files(model_folder(config)):
            tensors = list(_tensors(file))
            checksums = pool.map(lambda tensor: xxhash.xxh3_128_hexdigest(tensor[3]), tensors)
            described += [(*tensor[:3], checksum) for tensor, checksum in zip(tensors, checksums, strict=True)]
    return hashlib.sha256(json.dumps(sorted(described)).encode()).hexdigest()[:32]


def _weight_files(folder: Path) -> list[Path]:
    """Those that transformers reads: what the index names, else the single file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    single = folder / "model.safetensors"
    if not single.is_file():
        raise UserError(
            f"{folder} has no model.safetensors, so its weights cannot be identified for model.lora. Save the model "
            "again with save_pretrained of a current transformers"
        )
    return [single]


def _tensors(file: Path) -> Iterator[tuple[str, str, list[int], memoryview]]:
    """Name, dtype, shape and bytes of each tensor (https://huggingface.co/docs/safetensors, Format)."""
    try:
        with file.open("rb") as opened:
            view = memoryview(mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ))
        (length,) = struct.unpack("<Q", view[:8])
        header = json.loads(bytes(view[8 : 8 + length]))
        header.pop("__metadata__", None)
        data = view[8 + length :]
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            if not 0 <= start <= end <= len(data):
                raise ValueError(f"{name} ends beyond the file")
            yield name, entry["dtype"], entry["shape"], data[start:end]
    except (OSError, ValueError, KeyError, struct.error) as problem:
        raise UserError(f"{file} is no complete safetensors file ({problem}). Copy the model folder again") from problem
