"""Evaluations of a supervised run: loss of held-out targets, scores of completions, the best model, the curve."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.schema import RunConfig
from asyncrl.data.dataset import open_validation
from asyncrl.errors import UserError
from asyncrl.models.export import write_whole
from asyncrl.plugins import implementation
from asyncrl.processing.processor import PromptProcessor
from asyncrl.rewards.score import accuracy_and_reward, evaluation_scores, label_values, labels_by
from asyncrl_plugins.sft.rows import DemonstrationRows
from asyncrl_plugins.sft.settings import evaluator, scores_completions, settings_of
from asyncrl_plugins.sft.trainer import SupervisedTrainer

logger = logging.getLogger(__name__)

BEST_FOLDER, SCORED_FOLDER = "best", ".scored"
"""Folders of a run: the model of its best evaluation, and one that is scored."""
SHOWN = {"loss": "held-out loss", "accuracy": "accuracy", "accuracy_error": "± (standard error)", "reward": "reward"}
"""Columns of the curve."""


class Evaluations:
    """Scores models of a run on its held-out rows, and keeps the best one."""

    def __init__(self, config: RunConfig, processor: PromptProcessor, made: Sequence[Mapping[str, Any]] = ()):
        """`made`: records of earlier evaluations. Raises UserError where there is nothing to evaluate."""
        self._config, self._processor = config, processor
        self.records = [dict(record) for record in made]
        columns = open_validation(config.data, "environment")
        has_targets = columns is not None and config.data.target_key in columns.columns
        self._rows = DemonstrationRows(config, processor, is_held_out=True) if has_targets else None
        self._has_scores = scores_completions(config)
        if columns is None or not (has_targets or self._has_scores):
            every, missing = settings_of(config).evaluate_every, "data.val_files is empty"
            if columns is not None:
                missing = f"no held-out row has a column {config.data.target_key!r} (data.target_key), nor is there a "
                missing += "reward for one turn (reward.functions)"
            raise UserError(f"sft.evaluate_every is {every}, and {missing}. Give one, or set sft.evaluate_every=0")
        self._score = implementation(evaluator().implementation) if self._has_scores else None

    def evaluate(self, trainer: SupervisedTrainer, step: int) -> dict[str, Any]:
        """Score the model as it is now. The best one so far is kept in BEST_FOLDER."""
        best, scored = (self._config.run_path / name for name in (BEST_FOLDER, SCORED_FOLDER))
        with torch.random.fork_rng():  # a run makes the same steps with and without evaluations
            record: dict[str, Any] = {"step": step, "version": step, **(self._loss(trainer) if self._rows else {})}
            if self._has_scores:
                trainer.engine.export(self._processor.processor, scored)
                record |= self._scores(scored)
        is_best = all(_rank(record) > _rank(earlier) for earlier in self.records)
        if is_best and self._has_scores:
            write_whole(best, partial(shutil.copytree, scored, dirs_exist_ok=True))
        elif is_best:
            trainer.engine.export(self._processor.processor, best)
        shutil.rmtree(scored, ignore_errors=True)
        self.records.append(record)
        logger.info("step %d: %s%s", step, describe(record), ", the best so far" if is_best else "")
        return record

    def _loss(self, trainer: SupervisedTrainer) -> dict[str, float]:
        """Mean negative log-likelihood per token of the held-out targets."""
        assert self._rows is not None
        nats, tokens, at_once = 0.0, 0, trainer.settings.rows_per_step
        for first in range(0, len(self._rows.usable), at_once):
            shown = [self._rows.demonstration(index) for index in self._rows.usable[first : first + at_once]]
            nats += trainer.held_out_nats(shown)
            tokens += sum(len(each.target) for each in shown)
        return {"loss": nats / tokens, "loss_rows": len(self._rows.usable)}

    def _scores(self, folder: Path) -> dict[str, Any]:
        """Scores as those of `asyncrl eval`, on a copy of the model."""
        config = self._config
        size, by, name = config.evaluation.group_size, config.evaluation.by, config.reward.accuracy_component
        assert self._score is not None
        scored = self._score(config, folder)
        known = [accuracy_and_reward(item.score.components, item.score.reward, name) for item in scored]
        rows = [known[first : first + size] for first in range(0, len(known), size)]
        values = [item.sample.columns.get(by) for item in scored[::size]]
        labels = labels_by(by, values, "evaluation.by") if by else []
        return {**asdict(evaluation_scores(rows)), "group_size": size, **label_values(labels, rows)}

    @property
    def best(self) -> Mapping[str, Any]:
        """The first of the best records."""
        return max(self.records, key=_rank)

    def curve(self) -> str:
        """A line for each evaluation, under the names of its numbers."""
        columns = {key: name for key, name in SHOWN.items() if any(key in record for record in self.records)}
        lines = ["   ".join(["  step", *columns.values()])]
        for record in self.records:
            cells = (
                f"{math.nan if (value := record.get(key)) is None else value:{len(columns[key])}.4f}" for key in columns
            )
            lines.append("   ".join([f"{record['step']:6}", *cells]))
        return "\n".join(lines)


def describe(record: Mapping[str, Any]) -> str:
    """`held-out loss 0.4321, accuracy 0.7500, reward 0.7500`."""
    return ", ".join(f"{SHOWN[key]} {record[key]:.4f}" for key in ("loss", "accuracy", "reward") if key in record)


def _rank(record: Mapping[str, Any]) -> tuple[float, float]:
    """Order of records, the best one the largest: by accuracy, and equal ones by loss. What is not finite is worst."""
    accuracy, loss = (record.get(key) for key in ("accuracy", "loss"))
    found = (-math.inf if value is None or not math.isfinite(value) else value for value in (accuracy, loss and -loss))
    first, second = found
    return first, second
