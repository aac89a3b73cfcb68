"""Seconds of a learner's update with and without `learner.cpu_offload`, by part, and the peak of device memory.

python -m benchmarks.offload_cost [--size 1b] [--device cuda] [--rounds 3] [--tokens 16384] [--offloaded] [--profile]
The same batch each round: 16 prompts with three images x 8 completions of 256 tokens, all weights of a random
Qwen2.5-VL trained in bfloat16, with gradient checkpointing. With --device cpu --size tiny it tries itself out.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.memory_plan import size
from asyncrl.processing.processor import PromptProcessor
from benchmarks.gpu_cycle import TINY, WHOLE, cycle_config, make_prompts
from benchmarks.gpu_report import settings
from benchmarks.random_models import SIZES, make_model
from learner.training.engine import TorchEngine
from learner.training.packing import PackedTrajectory, TrainGroup, build_micro_batch, plan_micro_batches


def update(learner: TorchEngine, groups: Sequence[TrainGroup], tokens: int) -> dict[str, float]:
    """Seconds of each part of one update."""
    took: dict[str, float] = {"forward": 0.0, "backward": 0.0}
    clock = _Clock(learner.device)
    for part in plan_micro_batches(groups, tokens):
        outputs = learner.forward(build_micro_batch(learner.unwrap_model(), part, learner.device))
        took["forward"] += clock.lap()
        learner.backward(-outputs.logprobs.mean())
        took["backward"] += clock.lap()
    updates: Any = learner.updates  # torch's on fp32 masters
    updates.masters.take_gradients()
    torch.nn.utils.clip_grad_norm_(updates.masters.stepped(), 1.0)
    took["clip"] = clock.lap()
    updates.optimizer.step()
    took["AdamW"] = clock.lap()
    updates.masters.round_into_parameters()
    took["weights back"] = clock.lap()
    updates.optimizer.zero_grad(set_to_none=True)
    return took


class _Clock:
    def __init__(self, device: torch.device):
        self._device = device
        self.lap()

    def lap(self) -> float:
        """Seconds since the last lap, the device's work included."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        took, self._at = now - getattr(self, "_at", now), now
        return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, nargs="+", help="budgets of a micro-batch, one after the other")
    parser.add_argument("--offloaded", action="store_true", help="only with learner.cpu_offload")
    parser.add_argument("--compiled", action="store_true", help="with learner.compile_layers, too, after without")
    parser.add_argument("--profile", action="store_true", help="one more update at the end, by kernel")
    arguments = parser.parse_args()
    shape = TINY if arguments.size == "tiny" else WHOLE
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-offload-"))
    model = make_model(folder / "model", arguments.size, dtype="bfloat16", device=arguments.device)
    whole = settings(arguments.size, arguments.device, "hf", 0.0, offload=True)
    random, length = np.random.default_rng(0), shape["data"]["max_response_length"]
    for offload, compiled in product(
        (True,) if arguments.offloaded else (False, True), (False, True) if arguments.compiled else (False,)
    ):
        gc.collect()
        sections = {**whole, "learner": {**whole["learner"], "cpu_offload": offload, "compile_layers": compiled}}
        config = cycle_config(model, folder, shape, **sections)
        learner = TorchEngine(config.model_settings, config.learner.optim, total_updates=10)
        learner.prepare()
        prompts, rows = make_prompts(PromptProcessor(config.model), shape), iter(range(10**6))
        groups = [
            TrainGroup(
                prompt,
                tuple(
                    PackedTrajectory(
                        next(rows), random.integers(5, 300, length).astype(np.int32), np.ones(length, np.int32)
                    )
                    for _ in range(config.batch.group_size)
                ),
            )
            for prompt in prompts
        ]
        budgets = arguments.tokens or [config.batch.microbatch_tokens]
        for tokens in budgets:
            for number in range(1, arguments.rounds + 1):
                took = update(learner, groups, tokens)
                peak = size(torch.cuda.max_memory_allocated()) if arguments.device == "cuda" else "no device"
                parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in took.items())
                print(
                    f"offload {offload}, compiled {compiled}, {tokens} tokens, round {number}: {parts} s; peak {peak}",
                    flush=True,
                )
        if arguments.profile:
            with torch.profiler.profile() as recorded:
                update(learner, groups, budgets[-1])
            by = "self_cuda_time_total" if arguments.device == "cuda" else "self_cpu_time_total"
            print(recorded.key_averages().table(sort_by=by, row_limit=20, max_name_column_width=60))
        del learner
        if arguments.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
