"""Sync cycle, peak memory against the plan, sleep and wake against the link, log-prob parity: one table.

    python -m benchmarks.gpu_report [--size 4b] [--budget-gib 24] [--engines hf vllm] [--device cuda]
    python -m benchmarks.gpu_report --whole [--trl]

The first trains adapters, the second all weights with `learner.cpu_offload`, 16 prompts x 8 completions of 256 tokens;
--trl runs steps of TRL's GRPOTrainer on the same model, prompts and batch after it, on the whole device (alone with
--engines and nothing behind it). Runs on one
GPU without the network (the model is made here); with --device cpu --size tiny it tries itself out.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import gc
import importlib.util
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from asyncrl.devices.device import free_caches
from asyncrl.memory_plan import GIB, size
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.prometheus.peak_flops import peak_flops
from benchmarks.gpu_cycle import (
    FULL,
    QUESTION,
    TINY,
    WHOLE,
    Cycle,
    cycle_config,
    link_bytes_per_second,
    make_prompts,
    run_cycle,
)
from benchmarks.random_models import SIZES, make_model


def settings(
    size: str, device: str, engine: str, budget_gib: float, *, adapters: bool | None = None, offload: bool = False
) -> dict[str, dict[str, Any]]:
    """Adapters for 4 billion parameters, or `offload`: their full training needs over 24 GiB on the device
    (docs/decisions/011-memory-plan.md)."""
    adapted = (size == "4b" if adapters is None else adapters) and not offload
    model = {"lora": {"rank": 16 if adapted else 0}, "freeze_vision_tower": not offload}
    return {
        "model": {"dtype": "bfloat16" if device == "cuda" else "float32", **model},
        "learner": {"device": device, "gradient_checkpointing": adapted or offload, "cpu_offload": offload},
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


def rates(cycle: Cycle, device: torch.device) -> str:
    """Tokens/s of the last round's sampling and training, and the share of the device's peak that training uses."""
    samples, trains = cycle.step("engine samples again").seconds, cycle.step("learner trains again").seconds
    rest = ("engine sleeps again", "learner wakes", "learner publishes", "learner sleeps", "engine wakes")
    turns = sum(cycle.step(name).seconds for name in (*rest, "engine takes new weights"))
    lines = [
        f"sampling: {cycle.sampled / samples:,.0f} tokens/s ({cycle.sampled} tokens of completions)",
        f"training: {cycle.packed / trains:,.0f} tokens/s ({cycle.packed} packed tokens, optimiser included), "
        f"{cycle.flops / trains / peak_flops(device):.1%} of the device's peak (MFU)",
        f"a step: {samples + trains + turns:.1f} s, of which {turns:.1f} are turns of the device and publication",
    ]
    return "\n".join(lines)


def run_trl(model: Path, folder: Path, shape: dict[str, Any], sections: dict[str, dict[str, Any]], steps: int) -> str:
    """Steps of TRL's trainer on the cycle's prompts, in a process of its own that has the whole device."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    config = cycle_config(model, folder, shape, **sections)
    prompts = make_prompts(PromptProcessor(config.model), shape)
    rows = folder / "rows.parquet"
    asked, answers = [QUESTION] * len(prompts), ["0"] * len(prompts)
    pq.write_table(pa.table({"prompt": asked, "images": [list(p.images) for p in prompts], "answer": answers}), rows)
    data = {**shape["data"], "train_files": [str(rows)], "shuffle": False}
    config = cycle_config(model, folder, {**shape, "data": data}, **sections, data=data)
    file, record = folder / "trl.json", folder / "record.json"
    file.write_text(config.model_dump_json())
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.peer.trl_run", str(file), "--steps", str(steps)]
    subprocess.run([*command, "--rows-at-once", str(min(8, config.batch.group_size)), "--out", str(record)], check=True)
    found = json.loads(record.read_text())
    rows = config.batch.prompts_per_step * config.batch.group_size
    sampled = [rows * tokens for tokens in found["tokens"]]
    lines = ["## TRL", "", "| step | s | sampling | sampled tokens/s | training |", "|---|---|---|---|---|"]
    for number, (took, sampling) in enumerate(zip(found["seconds"], found["sampling_seconds"], strict=True)):
        rate = f"{sampled[number] / sampling:,.0f}"
        lines.append(f"| {number + 1} | {took:.1f} | {sampling:.1f} s | {rate} | {took - sampling:.1f} s |")
    return "\n".join([*lines, "", f"torch peak {size(found['peak_bytes'])}"])


def _gib(nbytes: int) -> str:
    return size(nbytes) if nbytes else ""


def main() -> None:
    from asyncrl_plugins.doctor.table import describe  # tests of a cycle do without

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="4b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--budget-gib", type=float, default=24.0)
    parser.add_argument("--whole", action="store_true", help="train all weights, with learner.cpu_offload")
    parser.add_argument("--trl", type=int, default=0, metavar="STEPS", help="of TRL's trainer, after it")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="rollout.engine_args of vLLM, as JSON")
    parser.add_argument("--engines", nargs="*", default=["hf"] + ["vllm"] * bool(importlib.util.find_spec("vllm")))
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-gpu-"))
    shape = (WHOLE if arguments.whole else FULL) if arguments.size == "4b" else TINY
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
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, arguments.budget_gib * GIB / total))
    for engine in arguments.engines:
        sections = settings(arguments.size, arguments.device, engine, arguments.budget_gib, offload=arguments.whole)
        sections["rollout"] |= {"engine_args": arguments.engine_args} if engine == "vllm" else {}
        config = cycle_config(model, folder, shape, **sections)
        cycle = asyncio.run(run_cycle(config, shape))
        print(f"## {engine}\n\n```\n{describe(cycle.plan)}\n```\n\n{report(cycle, off, onto)}\n", flush=True)
        print(rates(cycle, device), flush=True)
        del cycle
        free_caches(device)
    if arguments.trl:
        sections = settings(arguments.size, arguments.device, "hf", arguments.budget_gib, offload=arguments.whole)
        print(run_trl(model, folder, shape, sections, arguments.trl), flush=True)


if __name__ == "__main__":
    main()
