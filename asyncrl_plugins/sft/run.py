"""Supervised warm start: `python -m asyncrl_plugins.sft.run --config CONFIG [--resume] [key=value ...]`.

The same rows, prompts, packing, engines and ranks as reinforcement learning; the loss is the mean negative
log-likelihood of `data.target_key` per token of the whole step. The model is exported to `<run_dir>/export`. A run that
continues from a checkpoint makes the weights that it would have made, bit for bit.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig, changed
from asyncrl.data.prompt_sources import DataOrder
from asyncrl.data.prompts import RenderedPrompt
from asyncrl.devices.device import compute_in_full_float32, set_up_training
from asyncrl.processing.processor import prompt_processor
from asyncrl.run_folder.contents import EXPORT_FOLDER, save_config
from asyncrl.run_folder.lock import LearnerLock
from asyncrl.service_entry import StartMode, run_service
from asyncrl.telemetry.recorder import RunRecorder
from asyncrl.telemetry.tracker import TrackedRun, open_trackers
from asyncrl_plugins.sft.continuing import find_saved, recorded_settings, refuse_changes
from asyncrl_plugins.sft.evaluation import BEST_FOLDER, Evaluations, describe
from asyncrl_plugins.sft.rows import DemonstrationRows
from asyncrl_plugins.sft.settings import settings_of
from asyncrl_plugins.sft.start import check_start
from asyncrl_plugins.sft.trainer import Saved, SupervisedTrainer, following
from learner.loop.clean_stop import CleanStop, StopAsked
from learner.loop.follower import follow
from learner.loop.policy_export import ROWS, finish_export
from learner.loop.resume import DATE, refuse_taken, settle_day
from learner.ranks.group import ALONE
from learner.ranks.processes import Leader, leading, telling_given_ranks
from learner.ranks.rank_variables import rank_of_service, rank_variables, with_given_ranks

logger = logging.getLogger(__name__)

SERVICE = "asyncrl_plugins.sft.run"
CACHE_MIB = 1024
"""Room for encoded prompts: rows come back every epoch."""
REPORTS = 20
"""Progress lines of a run."""


class SupervisedRun:
    """A supervised run on rank 0: rows, trainer and recorder, and one optimiser step after the other."""

    def __init__(self, config: RunConfig, leader: Leader | None = None, saved: Saved | None = None):
        """`saved`: the checkpoint to continue from. Raises UserError where it is of other rows or settings."""
        self.processor = prompt_processor(
            config.model, config.environment, config.data.chat_template_kwargs, cache_mib=CACHE_MIB
        )
        if saved and (day := saved.settings.get(DATE)):
            config = changed(config, {DATE: day})
        self.config = config = changed(config, settle_day(config.model, self.processor))
        self.settings = settings_of(config)
        self.rows = DemonstrationRows(config, self.processor)
        self._recorded = recorded_settings(config, self.rows)
        if saved:
            refuse_changes(saved, self._recorded)
        self.order = DataOrder(len(self.rows.usable), config.trainer.seed, config.data.shuffle)
        self.steps = self.settings.steps or math.ceil(len(self.rows.usable) / self.settings.rows_per_step)
        self.made = saved.state.step if saved else 0
        """Steps that are made."""
        begins: dict[str, Any] = {"steps": self.steps, "template_date": config.model.template_date}
        begins |= {"checkpoint": str(saved.folder), "state": asdict(saved.state)} if saved else {"checkpoint": ""}
        self.trainer = SupervisedTrainer(
            config, self.processor, self.steps, leader.begin(**begins) if leader else ALONE, saved
        )
        tracked = TrackedRun(config.run_path, config.model_dump(mode="json"))
        self.recorder = RunRecorder(config.run_path, open_trackers(config.telemetry, tracked, Counter()))
        self.recorder.truncate_after(self.made, evaluations_after=self.made)
        self.recorder.bad_rows([vars(row) for row in self.rows.survey.bad])
        self.evaluations = (
            Evaluations(config, self.processor, self.recorder.evaluations()) if self.settings.evaluate_every else None
        )
        self._saved_step = self.made
        self._stop = CleanStop(config.trainer.stop_grace_s)

    def run(self) -> None:
        """Make the steps that are left, and export. A signal ends it after its step, with a checkpoint."""
        if self.made:
            logger.info("continuing after step %d of %d", self.made, self.steps)
        with self._stop.listening():
            try:
                self._make_steps()
                self._export()
            except StopAsked:
                self._save()
                self._stop.over()
                self._status("interrupted")
                logger.info("stopped after step %d of %d: asyncrl sft CONFIG --resume goes on", self.made, self.steps)
                raise
        self._status("finished")

    def _make_steps(self) -> None:
        self._status("training")
        if self.config.evaluation.before_training and not self.made:
            self._evaluate()
        started, first = time.monotonic(), self.made
        while self.made < self.steps:
            self._stop.check()
            values = self._learn(self.made + 1)
            self.made += 1
            self.recorder.step({"step": self.made, "time": time.time(), **values})
            is_last = self.made == self.steps
            if is_last or self.made % max(1, self.steps // REPORTS) == 0:
                rate = (time.monotonic() - started) / (self.made - first)
                said = "step %d of %d: loss %.4f, %.2f s per step"
                logger.info(said, self.made, self.steps, values["loss"], rate)
                self._status("training")
            if is_last or (self.settings.evaluate_every and self.made % self.settings.evaluate_every == 0):
                self._evaluate()
            if self.settings.save_freq and (is_last or self.made % self.settings.save_freq == 0):
                self._save()

    def _learn(self, step: int) -> dict[str, float]:
        """Make a step on the rows at its positions of the data order."""
        first = (step - 1) * self.settings.rows_per_step
        positions = range(first, first + self.settings.rows_per_step)
        indices = [self.rows.usable[self.order.row_at(position)] for position in positions]
        return self.trainer.learn(step, [self.rows.demonstration(index) for index in indices])

    def _evaluate(self) -> None:
        """Evaluate the model of this step, unless that is recorded."""
        if self.evaluations and all(record["step"] != self.made for record in self.evaluations.records):
            self._status("evaluating")
            self.recorder.evaluation(self.evaluations.evaluate(self.trainer, self.made))
            self._status("training")

    def _save(self) -> None:
        if self.made > self._saved_step:
            began = time.monotonic()
            folder = self.trainer.save(self.made, self._recorded)
            self._saved_step = self.made
            logger.info("%s: written in %.1f s", folder, time.monotonic() - began)

    def _status(self, phase: str) -> None:
        self.recorder.status(phase=phase, waiting_for="", step=self.made, total_steps=self.steps)

    def _export(self) -> None:
        folder = self.config.run_path / EXPORT_FOLDER
        self.trainer.engine.export(self.processor.processor, folder)
        self._finish(folder)
        if self.evaluations:
            best = self.evaluations.best
            if (folder := self.config.run_path / BEST_FOLDER).is_dir():
                self._finish(folder)
            logger.info(
                "evaluations:\n%s\nthe best is of step %d: %s", self.evaluations.curve(), best["step"], describe(best)
            )

    def _finish(self, folder: Path) -> None:
        """Give a folder its final form, and say how far that is from the policy."""
        model = self.config.model
        record = finish_export(model, model.quantization, self.processor, self._some_prompts, folder)
        logger.log(logging.WARNING if record.differs else logging.INFO, "finished: %s is %s", folder, record.describe())

    def _some_prompts(self) -> list[RenderedPrompt]:
        return [self.rows.render(index) for index in self.rows.usable[:ROWS]]


def main(config: RunConfig, start: StartMode) -> None:
    config = with_given_ranks(config)
    set_up_training(config.learner, config.trainer)
    compute_in_full_float32()
    if rank_of_service() > 0:
        follow(config, following)
        return
    environment = rank_variables(config.learner, config.trainer.mode)
    with ExitStack() as resources:
        given = resources.enter_context(telling_given_ranks(environment, config.learner.wait_timeout_s))
        held = resources.enter_context(LearnerLock(config.run_path, SERVICE))
        check_start(config.run_path, resume=start.resume)
        if not start.resume:
            refuse_taken(config.run_path)
        saved = find_saved(config.run_path) if start.resume else None
        divided = config.learner.is_divided
        leader = (
            resources.enter_context(leading(config.learner, config.network, environment, given, SERVICE))
            if divided
            else None
        )
        run = SupervisedRun(config, leader, saved)
        held.accept()
        save_config(config.run_path, dump_config(run.config))
        resources.callback(run.recorder.close)
        run.run()


if __name__ == "__main__":
    rank = rank_of_service()
    run_service(f"{SERVICE}-rank{rank}" if rank else SERVICE, main)
