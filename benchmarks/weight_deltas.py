"""How small the difference of two versions of a model is: what publishing only that would save. No version is published
like this.

    python -m benchmarks.weight_deltas runs/a/checkpoints/step-000003 runs/a/checkpoints/step-000004

For the weights in bfloat16, as large models are published, and in float32: the share of elements that changed, and how
much zstd (level 1) makes of the new weights, of old XOR new, and of that with each element's bytes in planes of their
own; with the CPU time of one thread.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file

DTYPES = ((torch.bfloat16, torch.int16), (torch.float32, torch.int32))


def flat(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """[N] all weights of a checkpoint, or of a model's folder."""
    inside = folder / "model"
    weights: dict[str, torch.Tensor] = {}
    for file in sorted((inside if inside.is_dir() else folder).glob("*.safetensors")):
        weights |= load_file(file)
    return torch.cat([weights[name].to(dtype).reshape(-1) for name in sorted(weights)])


def compressed(data: bytes) -> tuple[float, float, float]:
    """Times smaller, and GB/s of CPU time in and out."""
    codec = pa.Codec("zstd", compression_level=1)
    began = time.process_time()
    small = codec.compress(data, asbytes=True)
    middle = time.process_time()
    codec.decompress(small, decompressed_size=len(data))
    ended = time.process_time()
    return (
        len(data) / len(small),
        len(data) / max(middle - began, 1e-9) / 1e9,
        len(data) / max(ended - middle, 1e-9) / 1e9,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    arguments = parser.parse_args()
    print(
        "| weights | million | changed | sent as | times smaller | GB/s in | GB/s out |\n|---|---|---|---|---|---|---|"
    )
    for dtype, integer in DTYPES:
        old, new = flat(arguments.old, dtype), flat(arguments.new, dtype)
        if old.numel() != new.numel():
            raise SystemExit(f"{arguments.old} and {arguments.new} are of different models")
        difference = old.view(integer) ^ new.view(integer)
        planes = np.ascontiguousarray(difference.numpy().view(np.uint8).reshape(-1, new.element_size()).T)
        sent = {"itself": new.view(integer).numpy(), "old XOR new": difference.numpy(), "that, by planes": planes}
        changed = (difference != 0).double().mean().item()
        for name, array in sent.items():
            numbers = " | ".join(f"{number:.3g}" for number in compressed(array.tobytes()))
            print(f"| {dtype} | {new.numel() / 1e6:.2f} | {changed:.1%} | {name} | {numbers} |")


if __name__ == "__main__":
    main()
