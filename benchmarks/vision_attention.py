"""A pass of a Qwen2.5-VL-shaped vision tower and back: transformers' form of attention against one call per length.

    python -m benchmarks.vision_attention [--size tiny] [--images 16] [--side 224] [--rounds 7] [--device cpu]

Both forms take turns with the same random weights and images; seconds are medians. Says also whether results and
gradients are equal to the last bit, and how many calls of attention a pass makes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F
from transformers import Qwen2_5_VLForConditionalGeneration

from asyncrl.attention.vision_attention import attend_by_length
from asyncrl.demo.model import build_tokenizer
from benchmarks.random_models import PATCH_SIZE, SIZES, build_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--side", type=int, default=224, help="pixels of an image's side")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    towers = {"transformers": make_tower(arguments.size, device)}
    towers["by length"] = make_tower(arguments.size, device, by_length=True)
    side = arguments.side // PATCH_SIZE
    grid = torch.tensor([[1, side, side]] * arguments.images, device=device)
    pixels = torch.randn(arguments.images * side**2, 6 * PATCH_SIZE**2, device=device)
    pixels = pixels.to(towers["by length"].dtype)
    seconds: dict[str, list[float]] = {name: [] for name in towers}
    found: dict[str, list[torch.Tensor]] = {}
    calls: dict[str, int] = {}
    for number in range(arguments.rounds + 1):
        for name, tower in towers.items():
            with counted_calls() as counted:
                began = time.perf_counter()
                features = run(tower, pixels, grid)
                seconds[name] += [time.perf_counter() - began] if number else []
            found[name], calls[name] = features, counted[0]
    print("| form | calls of attention | s, forward and backward |\n|---|---|---|")
    for name in towers:
        print(f"| {name} | {calls[name]:,} | {median(seconds[name]):.3f} |")
    ratio = median(seconds["transformers"]) / median(seconds["by length"])
    equal = all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True))
    print(f"\n{ratio:.2f} times as fast; equal to the last bit: {equal}")


def make_tower(size: str, device: torch.device, *, by_length: bool = False) -> Any:
    config = build_config(size, build_tokenizer())
    torch.manual_seed(0)
    with device:
        model = Qwen2_5_VLForConditionalGeneration._from_config(
            config, attn_implementation="sdpa", dtype=torch.float32 if device.type == "cpu" else torch.bfloat16
        )
    if by_length:
        attend_by_length(model)
    return model.model.visual


def run(tower: Any, pixels: torch.Tensor, grid: torch.Tensor) -> list[torch.Tensor]:
    """Features and gradients."""
    tower.zero_grad()
    features = tower(pixels, grid_thw=grid).pooler_output
    features.float().square().mean().backward()
    if features.device.type == "cuda":
        torch.cuda.synchronize()
    return [features.detach(), *(parameter.grad for parameter in tower.parameters())]


@contextmanager
def counted_calls() -> Iterator[list[int]]:
    counted, original = [0], F.scaled_dot_product_attention

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        counted[0] += 1
        return original(*args, **kwargs)

    with patch("torch.nn.functional.scaled_dot_product_attention", call):
        yield counted


if __name__ == "__main__":
    main()
