"""Seconds of a decode step of the `hf` engine, of equal and of ragged rows, beside the time of its kernels.

    python -m benchmarks.decode_steps [--size 4b] [--device cuda] [--rows 128] [--prompt 900] [--steps 20]

A random Qwen2.5-VL decodes text. Ragged prompts have half to all of the tokens. `--repeated` decodes with the attention
of transformers, which repeats keys and values of padded rows; `--graphs` measures captured steps, too, after the
others. With --device cpu --size tiny it tries itself out, without a capture.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from asyncrl.config.parts import cache_columns
from asyncrl.config.sections import ModelConfig
from asyncrl.models.loading import load_model
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl_plugins.cuda_graphs.batch import GraphedBatch
from asyncrl_plugins.cuda_graphs.graphs import CudaCapture, StepGraphs
from benchmarks.random_models import SIZES, make_model
from protocol.messages import Sampling
from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.hf.decode_batch import DecodeBatch
from rollout_server.engines.hf.grouped_attention import for_decoding

WARM_UP = 2


def batch_of(
    model: Any, device: torch.device, arguments: argparse.Namespace, *, ragged: bool, graphs: bool
) -> DecodeBatch:
    random = np.random.default_rng(0)
    sampling = Sampling(temperature=1.0, max_new_tokens=arguments.steps + WARM_UP + 2, stop_token_ids=())
    batch = DecodeBatch(model, (), device)
    if graphs:
        most = arguments.rows, cache_columns(arguments.prompt + sampling.max_new_tokens)
        capture = partial(CudaCapture, device) if device.type == "cuda" else None
        batch = GraphedBatch(model, (), device, most=most, graphs=StepGraphs(capture))
    for number in range(arguments.rows):
        length = int(random.integers(arguments.prompt // 2, arguments.prompt)) if ragged else arguments.prompt
        prompt = EncodedPrompt.of_text(random.integers(5, 300, length).astype(np.int32))
        batch.join(batch.prefill([GenerationRequest(number, prompt, 1, number, sampling)], 0))
    return batch


def measure(batch: DecodeBatch, device: torch.device, steps: int) -> tuple[float, float]:
    """Median seconds of a step, and its kernels' seconds on the device (0 on a CPU)."""

    def step() -> float:
        began = time.perf_counter()
        batch.step(0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    for _ in range(WARM_UP):
        step()
    seconds = median(step() for _ in range(steps - 1))
    if device.type != "cuda":
        return seconds, 0.0
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step()
    return seconds, sum(event.self_device_time_total for event in recorded.key_averages()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="4b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=900)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeated", action="store_true")
    parser.add_argument("--graphs", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    folder = make_model(Path(tempfile.mkdtemp()) / "model", arguments.size, dtype=dtype, device=arguments.device)
    loaded: Any = load_model(ModelConfig(path=str(folder), dtype=dtype), device=device)
    model = for_decoding(loaded.eval().requires_grad_(False), groups_queries=not arguments.repeated)
    print("| rows | a step, ms | its kernels, ms | tokens/s |\n|---|---|---|---|")
    for graphs, ragged in product((False, True) if arguments.graphs else (False,), (False, True)):
        with torch.inference_mode():
            batch = batch_of(model, device, arguments, ragged=ragged, graphs=graphs)
            seconds, kernels = measure(batch, device, arguments.steps)
        name = f"{arguments.rows}, {'ragged' if ragged else 'equal'}{', graphs' if graphs else ''}"
        print(f"| {name} | {1e3 * seconds:.1f} | {1e3 * kernels:.1f} | {arguments.rows / seconds:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
