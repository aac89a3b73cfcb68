"""Time and memory of a decode step on the `hf` engine's cache, against transformers' DynamicCache, on a CPU.

    python -m benchmarks.decode_cache [--rows 8] [--lengths 256 1024 4096] [--steps 16] [--dtype float32]

Both caches begin with the same random keys and values of left-padded rows, and take turns step by step, on one thread;
the first step finds no room and lets the cache grow. Logits must be equal bit for bit. Prints a Markdown table for each
shape of model: medians of CPU time, and the most bytes that were alive beside the weights, the cache itself included.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.cache_utils import Cache, DynamicCache

from asyncrl.memory_plan.live_bytes import LiveBytes
from rollout_server.engines.hf.growing_cache import GrowingCache

SHAPES = {
    "the demo's model": {"hidden": 128, "layers": 4, "heads": 4, "key heads": 2},
    "the demo's model, a key head for each query head": {"hidden": 128, "layers": 4, "heads": 4, "key heads": 4},
    "10 layers of 640": {"hidden": 640, "layers": 10, "heads": 10, "key heads": 2},
}
VOCABULARY = 512


def make_model(shape: dict[str, int], dtype: torch.dtype) -> Any:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=shape["hidden"],
        intermediate_size=3 * shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["key heads"],
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen2ForCausalLM(config).eval().requires_grad_(False).to(dtype)


def filled(model: Any, rows: int, length: int) -> DynamicCache:
    config, cache = model.config, DynamicCache()
    draw = torch.Generator().manual_seed(0)
    size = (rows, config.num_key_value_heads, length, config.hidden_size // config.num_attention_heads)
    for layer in range(config.num_hidden_layers):
        keys, values = (torch.randn(size, generator=draw).to(model.dtype) for _ in range(2))
        cache.update(keys, values, layer)
    return cache


def filled_growing(model: Any, rows: int, length: int) -> GrowingCache:
    """A cache with no room for another column."""
    cache = GrowingCache()
    with patch("rollout_server.engines.hf.growing_cache.cache_columns", lambda tokens: tokens):
        cache.join(filled(model, rows, length), torch.arange(rows), length)
    return cache


MAKE = (filled, filled_growing)


def step(model: Any, cache: Cache, rows: int, length: int) -> torch.Tensor:
    """One token of each row behind `length` others, of which a row has up to a third less than the longest."""
    padding = torch.arange(rows)[:, None] * length // (3 * rows)
    return model(
        input_ids=torch.full((rows, 1), 7),
        attention_mask=(torch.arange(length + 1)[None] >= padding).long(),
        position_ids=length - padding,
        past_key_values=cache,
        use_cache=True,
    ).logits


@torch.inference_mode()
def measure(model: Any, rows: int, length: int, steps: int) -> tuple[list[float], list[int]]:
    """Median ms per step and most bytes, of DynamicCache and of GrowingCache."""
    caches, seconds = [make(model, rows, length) for make in MAKE], ([], [])
    for number in range(steps):
        logits = []
        for cache, taken in zip(caches, seconds, strict=True):
            started = time.process_time()
            logits.append(step(model, cache, rows, length + number))
            taken.append(time.process_time() - started)
        assert torch.equal(*logits), f"other logits after {length + number} tokens"
    del caches, cache
    peaks = []
    for make in MAKE:
        with LiveBytes("cpu", known=[*model.parameters(), *model.buffers()]) as live:
            cache = make(model, rows, length)
            live.peak = live.live
            for number in range(3):
                step(model, cache, rows, length + number)
            del cache
        peaks.append(live.peak)
    return [1e3 * median(taken) for taken in seconds], peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name, shape in SHAPES.items():
        model = make_model(shape, getattr(torch, arguments.dtype))
        print(f"\n{arguments.rows} rows, {arguments.dtype}, {name}\n")
        print("| tokens | ms joined | in place | ratio | MiB joined | in place |")
        print("|---|---|---|---|---|---|")
        for length in arguments.lengths:
            (old, new), peaks = measure(model, arguments.rows, length, arguments.steps)
            memory = " | ".join(f"{peak / 2**20:.1f}" for peak in peaks)
            print(f"| {length:,} | {old:.1f} | {new:.1f} | {old / new:.2f} | {memory} |", flush=True)


if __name__ == "__main__":
    main()
