"""Supervised warm start: `python -m learner.sft --config CONFIG [key=value ...]`.

The same rows, prompts, packing and engine as reinforcement learning; the loss is the mean negative log-likelihood of
`data.target_key` per token of the whole step. The model is exported to `<run_dir>/export`.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.data.dataset import open_train
from asyncrl.data.order import DataOrder
from asyncrl.data.prompts import PromptRenderer, row_target
from asyncrl.errors import BadStateError, UserError
from asyncrl.models.prompt_processor import prompt_processor
from asyncrl.models.row_survey import usable_rows
from asyncrl.run_folder.contents import save_config
from asyncrl.run_folder.lock import LearnerLock
from asyncrl.service_entry import Start, run_service
from asyncrl.telemetry.recorder import RunRecorder
from asyncrl.telemetry.trackers import open_trackers
from learner.resume import refuse_taken
from learner.training.engine import create_engine
from learner.training.packing import Completion, TrainGroup, plan_micro_batches
from learner.training.roles import Roles

logger = logging.getLogger(__name__)

CACHE_MIB = 1024
"""Room for encoded prompts: rows come back every epoch."""
REPORTS = 20
"""Progress lines of a run."""


class SupervisedRun:
    """A supervised run: rows, engine and recorder, and one optimiser step after the other."""

    def __init__(self, config: RunConfig):
        self.config = config
        self.rows = open_train(config.data, "sft")
        self.renderer = PromptRenderer(config.data)
        self.processor = prompt_processor(config, cache_mib=CACHE_MIB)
        survey = usable_rows(self.rows, self.renderer, self.processor, config, "training", self._target_ids)
        bad_rows = [vars(row) for row in survey.bad]
        self.usable = survey.usable
        self.order = DataOrder(len(self.usable), config.trainer.seed, config.data.shuffle)
        self.steps = config.sft.steps or math.ceil(len(self.usable) / config.sft.rows_per_step)
        self.engine = create_engine(config, config.sft.optim, self.steps)
        self.engine.prepare()
        self.features = Roles(self.engine).share_features(config.learner)
        self.recorder = RunRecorder(config.run_path, open_trackers(config, Counter()))
        self.recorder.bad_rows(bad_rows)

    def run(self) -> None:
        started = time.monotonic()
        for step in range(1, self.steps + 1):
            first = (step - 1) * self.config.sft.rows_per_step
            positions = range(first, first + self.config.sft.rows_per_step)
            indices = [self.usable[self.order.row_at(position)] for position in positions]
            values = self.step([self._demonstration(row, index) for row, index in enumerate(indices)])
            self.recorder.step({"step": step, "time": time.time(), **values})
            if step % max(1, self.steps // REPORTS) == 0 or step == self.steps:
                rate = (time.monotonic() - started) / step
                logger.info("step %d of %d: loss %.4f, %.2f s per step", step, self.steps, values["loss"], rate)
        self.engine.export(self.processor.processor, self.config.run_path / "export")
        logger.info("finished: the model is in %s", self.config.run_path / "export")

    def step(self, demonstrations: Sequence[TrainGroup]) -> dict[str, float]:
        """One optimiser step on the mean negative log-likelihood per target token."""
        targets = sum(len(c.token_ids) for group in demonstrations for c in group.completions)
        total = 0.0
        for part in plan_micro_batches(demonstrations, self.config.batch.tokens_per_microbatch):
            micro_batch = self.engine.pack(part)
            loss = -self.engine.forward(micro_batch).logprobs.sum() / targets
            self.engine.backward(loss)
            total += float(loss.detach())
        if not math.isfinite(total):
            raise BadStateError(f"the loss is {total}: lower sft.optim.lr ({self.config.sft.optim.lr})")
        reused = self.features.report() if self.features else {}
        return {"loss": total, "tokens": float(targets), **reused, **self.engine.optimizer_step()}

    def _demonstration(self, row: int, index: int) -> TrainGroup:
        """The row's prompt with its target and the end-of-sequence token as the one completion."""
        row_id = self.rows.row_id(index)
        rendered = self.renderer.render(self.rows[index], row_id)
        prompt = self.processor.encode(rendered.prompt, rendered.blobs)
        ids = self._target_ids(self.rows[index], row_id)
        return TrainGroup(prompt, (Completion(row, np.asarray(ids, np.int32), np.ones(len(ids), np.uint8)),))

    def _target_ids(self, row: Mapping[str, Any], row_id: str) -> list[int]:
        """Token ids of the demonstration. Raises UserError where there is none, or it is too long."""
        text = row_target(row, self.config.data, row_id)
        ids = self.processor.tokenize_demonstration(text)
        if len(ids) > self.config.data.max_response_length:
            raise UserError(
                f"row {row_id}: the target has {len(ids)} tokens, over data.max_response_length = "
                f"{self.config.data.max_response_length}. Raise it or shorten the target"
            )
        return ids


def main(config: RunConfig, start: Start) -> None:
    if config.learner.is_divided:
        raise UserError(
            f"asyncrl sft trains in one process, and learner.engine is {config.learner.engine}. Set "
            "learner.engine=torch learner.num_processes=1"
        )
    if start.resume:
        raise UserError("asyncrl sft cannot resume; start it again in another run_dir")
    if config.learner.cpu_threads:
        torch.set_num_threads(config.learner.cpu_threads)
    torch.manual_seed(config.trainer.seed)
    with LearnerLock(config.run_path, "learner.sft") as held:
        refuse_taken(config.run_path)
        run = SupervisedRun(config)
        held.accept()
        save_config(config)
        try:
            run.run()
        finally:
            run.recorder.close()


if __name__ == "__main__":
    run_service("learner.sft", main)
