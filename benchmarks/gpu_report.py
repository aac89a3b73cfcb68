"""Sync cycle, peak memory against the plan, sleep and wake against the link, log-prob parity: one table.

python -m benchmarks.gpu_report [--size 4b] [--budget-gib 24] [--engines hf vllm] [--device cuda]
Runs on one GPU without the network (the model is made here); with --device cpu --size tiny it tries itself out.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import gc
import importlib.util
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

from asyncrl.tools.memory_plan.table import describe
from asyncrl.tools.numbers import GIB, size
from benchmarks.gpu_cycle import FULL, TINY, Cycle, cycle_config, link_bytes_per_second, run_cycle
from benchmarks.random_models import SIZES, make_model


def settings(
    size: str, device: str, engine: str, budget_gib: float, *, adapters: bool | None = None
) -> dict[str, dict[str, Any]]:
    """Adapters for 4 billion parameters, whose full training needs over 24 GiB: docs/decisions/011-memory-plan.md."""
    adapted = size == "4b" if adapters is None else adapters
    return {
        "model": {"dtype": "bfloat16" if device == "cuda" else "float32", "lora": {"rank": 16 if adapted else 0}},
        "learner": {"device": device, "gradient_checkpointing": adapted},
        "rollout": {"device": device, "engine": engine},
        "gpu_memory": {"budget_gib": budget_gib},
    }


def report(cycle: Cycle, off: float, onto: float) -> str:
    lines = [
        "| step | s | moved | of the link's speed | torch peak | planned | device in use after |",
        "|---|---|---|---|---|---|---|",
    ]
    for step in cycle.steps:
        limit = off if "sleeps" in step.name else onto
        share = f"{step.moved / limit / step.seconds:.0%}" if step.moved else ""
        cells = (
            step.name,
            f"{step.seconds:.2f}",
            _gib(step.moved),
            share,
            _gib(step.peak),
            _gib(step.planned),
            _gib(step.left),
        )
        lines.append("| " + " | ".join(cells) + " |")
    for number, difference in enumerate(cycle.differences, 1):
        lines.append(
            f"\nlog-probs of engine and learner, round {number}: {difference.size} tokens, "
            f"difference at most {difference.max():.2g}, mean {difference.mean():.2g}"
        )
    return "\n".join(lines)


def _gib(nbytes: int) -> str:
    return size(nbytes) if nbytes else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="4b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--budget-gib", type=float, default=24.0)
    parser.add_argument("--engines", nargs="+", default=["hf"] + ["vllm"] * bool(importlib.util.find_spec("vllm")))
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-gpu-"))
    shape = FULL if arguments.size == "4b" else TINY
    dtype = "bfloat16" if arguments.device == "cuda" else "float32"
    model = make_model(folder / "model", arguments.size, dtype=dtype, device=arguments.device)
    gc.collect()
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        name = torch.cuda.get_device_name(device)
    off, onto = link_bytes_per_second(device)
    print(f"# {name}, torch {torch.__version__}, {datetime.date.today()}\n")
    print(f"link: {off / GIB:.1f} GiB/s off the device, {onto / GIB:.1f} GiB/s onto it (pinned)\n")
    for engine in arguments.engines:
        config = cycle_config(
            model, folder, shape, **settings(arguments.size, arguments.device, engine, arguments.budget_gib)
        )
        cycle = asyncio.run(run_cycle(config, shape))
        print(f"## {engine}\n\n```\n{describe(cycle.plan)}\n```\n\n{report(cycle, off, onto)}\n", flush=True)


if __name__ == "__main__":
    main()
