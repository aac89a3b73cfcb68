"""How small the difference of two versions of a model is, and what it costs: network.weights_compression=delta.

    python -m benchmarks.weight_deltas runs/a/checkpoints/step-000003 runs/a/checkpoints/step-000004
    python -m benchmarks.weight_deltas --lr 1e-6 1e-4 [--mib 64]

For the weights of two checkpoints, or for normal ones that have taken a step of such a size, in bfloat16, as large
models are published, and in float32: the share of elements that changed, and how much zstd (level 1) makes of the new
weights, of old XOR new, and of chunks of 2 MiB as they are published: by planes, and plain where that is not worth it.
With the CPU time of one thread, of zstd alone, and of all that is done with a published chunk but its checksum.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file

from protocol.download import CHUNK_BYTES
from protocol.weight_deltas import pack, unpack

DTYPES = ((torch.bfloat16, torch.int16), (torch.float32, torch.int32))
Row = tuple[float, float, float]
"""Times smaller, and GB/s of CPU time in and out."""


def flat(folder: Path) -> torch.Tensor:
    """[N] all weights of a checkpoint, or of a model's folder."""
    inside = folder / "model"
    weights: dict[str, torch.Tensor] = {}
    for file in sorted((inside if inside.is_dir() else folder).glob("*.safetensors")):
        weights |= load_file(file)
    return torch.cat([weights[name].float().reshape(-1) for name in sorted(weights)])


def stepped(mib: int, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] normal weights, as many as have `mib` in bfloat16, and the same after a step of at most `rate`."""
    generator = torch.Generator().manual_seed(0)
    old = 0.02 * torch.randn(mib << 19, generator=generator)
    return old, old + rate * (2 * torch.rand(old.shape, generator=generator) - 1)


def compressed(data: bytes) -> Row:
    codec = pa.Codec("zstd", compression_level=1)
    began = time.thread_time()
    small = codec.compress(data, asbytes=True)
    middle = time.thread_time()
    codec.decompress(small, decompressed_size=len(data))
    ended = time.thread_time()
    return (
        len(data) / len(small),
        len(data) / max(middle - began, 1e-9) / 1e9,
        len(data) / max(ended - middle, 1e-9) / 1e9,
    )


def published(old: memoryview, new: memoryview, width: int) -> Row:
    small, into = 0, memoryview(bytearray(CHUNK_BYTES))
    seconds = [1e-9, 1e-9]
    pack(old[:width], new[:width], width)  # pyarrow is loaded
    for start in range(0, new.nbytes, CHUNK_BYTES):
        before, after = old[start : start + CHUNK_BYTES], new[start : start + CHUNK_BYTES]
        began = time.thread_time()
        packed = pack(before, after, width)
        middle = time.thread_time()
        seconds[0] += middle - began
        small += after.nbytes if packed is None else len(packed)
        if packed is not None:
            unpack(memoryview(packed), before, into[: after.nbytes], width)
            seconds[1] += time.thread_time() - middle
            assert into[: after.nbytes] == after
    has_any = small < new.nbytes
    return new.nbytes / small, new.nbytes / seconds[0] / 1e9, new.nbytes / seconds[1] / 1e9 if has_any else math.nan


def pairs(arguments: argparse.Namespace) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    for rate in arguments.lr:
        yield f"normal, lr {rate:g}, ", *stepped(arguments.mib, rate)
    if arguments.folders:
        old, new = map(flat, arguments.folders)
        if old.numel() != new.numel():
            raise SystemExit(f"{' and '.join(map(str, arguments.folders))} are of different models")
        yield "", old, new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", help="the old and the new one")
    parser.add_argument("--lr", type=float, nargs="+", default=[], help="without folders")
    parser.add_argument("--mib", type=int, default=64, help="of a version in bfloat16, with --lr")
    arguments = parser.parse_args()
    if len(arguments.folders) not in (0, 2) or not arguments.folders + arguments.lr:
        parser.error("give two folders, or --lr")
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print(
        "| weights | million | changed | sent as | times smaller | GB/s in | GB/s out |\n|---|---|---|---|---|---|---|"
    )
    for name, old_weights, new_weights in pairs(arguments):
        for dtype, integer in DTYPES:
            old, new = old_weights.to(dtype).view(integer), new_weights.to(dtype).view(integer)
            difference = old ^ new
            changed = (difference != 0).double().mean().item()
            old_bytes, new_bytes = (each.numpy().view(np.uint8).data for each in (old, new))
            rows = {
                "itself": compressed(new_bytes.tobytes()),
                "old XOR new": compressed(difference.numpy().tobytes()),
                "published chunks": published(old_bytes, new_bytes, dtype.itemsize),
            }
            for sent, row in rows.items():
                numbers = " | ".join(f"{number:.3g}" for number in row)
                print(f"| {name}{dtype} | {new.numel() / 1e6:.2f} | {changed:.1%} | {sent} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
