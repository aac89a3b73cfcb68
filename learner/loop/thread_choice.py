"""Threads of a learner on a CPU whose cores rollout servers use, too (learner.cpu_threads=0).

A launch gives half of the cores to each side. When the first groups have been sampled, the learner takes all of them if
its step is slower than the sampling and more threads make it faster. This is chosen once in a run, because the last
bits of a sum depend on the number of threads: a resumed run goes on with the number in metrics.jsonl.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from asyncrl.config.service_sections import LearnerConfig
from asyncrl.launch.processes import available_cores
from asyncrl.telemetry.jsonl import JsonlTail
from asyncrl.telemetry.recorder import METRICS_FILE
from learner.groups.ticket import ReceivedGroup
from learner.loop.trainer import Trainer
from learner.training.batch import make_batch
from learner.training.engine import TorchEngine
from learner.training.packing import MicroBatch, plan_micro_batches
from protocol.messages import ServerHeartbeat

logger = logging.getLogger(__name__)

PASSES = 3
"""Forward passes that take as long as one with its backward pass."""
LEAST_S = 0.1
"""A forward pass that is shorter gains nothing from threads that have to meet after each product."""
LEAST_GAIN = 1.1


class ThreadChoice:
    def __init__(self, run_path: Path, learner: LearnerConfig, device: torch.device, *, is_shared: bool):
        """`is_shared`: servers sample while the learner trains."""
        self._is_open = is_shared and device.type == "cpu" and not learner.is_divided and not learner.cpu_threads
        if self._is_open and (lines := JsonlTail(run_path / METRICS_FILE).new_records()[0]):
            torch.set_num_threads(min(int(lines[-1]["cpu_threads"]), available_cores()))
            self._is_open = False

    def choose(self, training: Trainer, groups: Sequence[ReceivedGroup], beats: Iterable[ServerHeartbeat]) -> None:
        """Choose by the groups of the first step, and by the speed of sampling that the servers tell."""
        if not self._is_open:
            return
        self._is_open = False
        engine, train_groups = training.engine, make_batch(groups, training.processor).train_groups
        half, cores = torch.get_num_threads(), available_cores()
        speed = sum(beat.tokens_generated / beat.busy_s for beat in beats if beat.busy_s)
        if cores <= half or not speed or not train_groups:
            return
        sampling_s = sum(int(item.group.is_sampled.sum()) for item in groups) / speed
        first = plan_micro_batches(train_groups, engine.tokens_at_once(training.config.batch.microbatch_tokens))[0]
        passes = PASSES * sum(group.num_tokens for group in train_groups) / sum(group.num_tokens for group in first)
        micro_batch = engine.pack(first)
        with_half = _seconds(engine, micro_batch)
        if with_half < LEAST_S or passes * with_half < sampling_s:
            return
        torch.set_num_threads(cores)
        with_all = _seconds(engine, micro_batch)
        if with_half < LEAST_GAIN * with_all:
            torch.set_num_threads(half)
        logger.info(
            "%d threads of %d cores (learner.cpu_threads=0): a step takes about %.1f s with %d, %.1f with %d, and its "
            "sampling %.1f",
            *(torch.get_num_threads(), cores, passes * with_half, half, passes * with_all, cores, sampling_s),
        )


@torch.no_grad()
def _seconds(engine: TorchEngine, micro_batch: MicroBatch) -> float:
    began = time.monotonic()
    engine.forward(micro_batch)
    return time.monotonic() - began
