"""Roles of a step: the models whose log-probs or values a batch is scored with before its first update."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from asyncrl.config.schema import RunConfig
from learner.training.batch import Batch
from learner.training.critic import Critic
from learner.training.engine import TorchEngine
from learner.training.packing import MicroBatch, TrainGroup, build_micro_batch, plan_micro_batches


@dataclass(frozen=True)
class Scored:
    """A batch as the roles see it: [N] over its trained tokens, detached, on the CPU; None where nothing asks."""

    proximal_logprobs: torch.Tensor | None = None
    """Of the learner's policy at the start of the step."""
    entropies: torch.Tensor | None = None
    """Of the same policy's distributions."""
    squared_probabilities: torch.Tensor | None = None
    """Sums over the vocabulary of that policy's squared probabilities."""
    reference_logprobs: torch.Tensor | None = None
    """Of the reference policy."""
    values: torch.Tensor | None = None
    """Of the critic at the start of the step."""


class Roles:
    """The actor, which is trained, and the roles that only score."""

    def __init__(self, actor: TorchEngine, config: RunConfig, critic: Critic | None = None):
        self.actor = actor
        self.critic = critic
        self._budget = config.batch.tokens_per_microbatch

    @torch.no_grad()
    def score(self, batch: Batch, wanted: Collection[str]) -> Scored:
        """Compute the `wanted` columns, by their names; each micro-batch is built once."""
        columns = {name: torch.zeros(len(batch.trained.row)) for name in wanted}
        for micro_batch in self.micro_batches(batch.train_groups) if columns else ():
            place = batch.places(micro_batch.row, micro_batch.column)
            if "proximal_logprobs" in columns:
                outputs = self.actor.forward(micro_batch, entropy="value" if "entropies" in columns else "none")
                columns["proximal_logprobs"][place] = outputs.logprobs.cpu()
                if outputs.entropies is not None:
                    columns["entropies"][place] = outputs.entropies.cpu()
            if "squared_probabilities" in columns:
                columns["squared_probabilities"][place] = self.actor.squared_probabilities(micro_batch).cpu()
            if "values" in columns:
                assert self.critic is not None
                columns["values"][place] = self.critic.values(micro_batch).cpu()
            if "reference_logprobs" in columns:
                with self.actor.reference():
                    columns["reference_logprobs"][place] = self.actor.forward(micro_batch).logprobs.cpu()
        return Scored(**columns)

    def micro_batches(self, groups: Sequence[TrainGroup]) -> Iterator[MicroBatch]:
        """Build one at a time: only one micro-batch's pixels are on the device."""
        for part in plan_micro_batches(groups, self._budget):
            yield build_micro_batch(self.actor.unwrap_model(), part, self.actor.device)
