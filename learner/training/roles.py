"""Roles of a step: the models whose log-probs or values a batch is scored with before its first update."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from asyncrl.config.part_settings import ModelSettings
from asyncrl.config.service_sections import CriticConfig, LearnerConfig
from asyncrl.devices.sleeping import fixed_tokens
from asyncrl.models.output_head import add_value_head, read_score_head, values
from learner.ranks.group import ALONE, Ranks
from learner.training.batch import Batch
from learner.training.engine import TorchEngine
from learner.training.packing import MicroBatch, TrainGroup
from learner.training.rank_plan import RankWork, Share, plan_shares
from learner.training.reference import Reference, WithoutAdapters
from learner.training.sharded_files import Write
from learner.training.vision_features import VisionFeatures


@dataclass(frozen=True)
class Scored:
    """A batch as the roles see it: [N] over its trained tokens, detached, on the CPU; None where nothing asks."""

    proximal_logprobs: torch.Tensor | None = None
    """Log-probs of the learner's policy at the start of the step."""
    entropies: torch.Tensor | None = None
    """Entropies of the same policy's distributions."""
    squared_probabilities: torch.Tensor | None = None
    """Sums over the vocabulary of that policy's squared probabilities."""
    reference_logprobs: torch.Tensor | None = None
    """Log-probs of the reference policy."""
    exact_kl: torch.Tensor | None = None
    """KL(policy || reference) at the start of the step, summed over the vocabulary."""
    values: torch.Tensor | None = None
    """Values of the critic at the start of the step."""


OF_THE_ACTOR = frozenset({"proximal_logprobs", "entropies", "squared_probabilities", "exact_kl"})
"""Columns that one forward pass of the actor gives."""
OF_THE_REFERENCE = frozenset({"reference_logprobs", "exact_kl"})
"""Columns that the reference has a part in."""


@dataclass(frozen=True)
class Roles:
    """The actor, which is trained, the critic, which is trained beside it, and the reference, which only scores."""

    actor: TorchEngine
    critic: Critic | None = None
    own_reference: Reference | None = None
    """One with weights of its own."""
    ranks: Ranks = ALONE
    """The processes that the models are in parts on."""
    work: RankWork = field(default_factory=RankWork)

    @property
    def reference(self) -> Reference | WithoutAdapters:
        """The reference; without one of its own it is the actor's model without adapters."""
        return self.own_reference or WithoutAdapters(self.actor)

    def share_features(self, settings: LearnerConfig) -> VisionFeatures | None:
        """Give all roles one place where features of images are kept. None where the actor's vision tower is trained.

        Each rank has its own. Where they gather the tower's weights, they agree in each pass how often it runs.
        """
        if not settings.vision_features_mib or not self.actor.facts.frozen_vision:
            return None
        agree = {"passes_of_all": self.ranks.most} if self.actor.sharding.gathers else {}
        features = VisionFeatures(settings.vision_features_mib * 2**20, **agree)
        for role in (self.actor, self.critic, self.own_reference):
            if role is not None:
                role.features = features
        return features

    @torch.no_grad()
    def score(self, batch: Batch, wanted: Collection[str], tokens_per_microbatch: int) -> Scored:
        """Compute the `wanted` columns, by their names; each micro-batch is built once."""
        columns = {name: torch.zeros(len(batch.trained.row)) for name in wanted}
        plan = self.plan(batch.train_groups, tokens_per_microbatch) if columns else ()
        with nullcontext() if OF_THE_REFERENCE.isdisjoint(wanted) else self.reference.on_device():
            for micro_batch in self.micro_batches(plan):
                place = batch.places(micro_batch.row, micro_batch.column)
                for name, values in self._score_micro_batch(micro_batch, columns.keys()).items():
                    if not micro_batch.is_idle:
                        columns[name][place] = values.cpu()
        return Scored(**self.ranks.sum_columns(columns))

    def _score_micro_batch(self, micro_batch: MicroBatch, wanted: Collection[str]) -> dict[str, torch.Tensor]:
        """[n] each."""
        found: dict[str, torch.Tensor | None] = {}
        if not OF_THE_ACTOR.isdisjoint(wanted):
            outputs = self.actor.forward(
                micro_batch,
                entropy="value" if "entropies" in wanted else "none",
                squared_probabilities="squared_probabilities" in wanted,
                comparison=self.reference.exact_kl(micro_batch) if "exact_kl" in wanted else None,
            )
            found = {
                "proximal_logprobs": outputs.logprobs,
                "entropies": outputs.entropies,
                "squared_probabilities": outputs.squared_probabilities,
                "exact_kl": outputs.compared,
            }
        if "values" in wanted:
            assert self.critic is not None
            found["values"] = self.critic.values(micro_batch)
        if "reference_logprobs" in wanted:
            found["reference_logprobs"] = self.reference.forward(micro_batch).logprobs
        return {name: values for name, values in found.items() if values is not None and name in wanted}

    def micro_batches(self, plan: Sequence[Sequence[Share]]) -> Iterator[MicroBatch]:
        """Build this rank's of a plan, one at a time: only one micro-batch's pixels are on the device."""
        return self.work.of(self._micro_batches(plan))

    def plan(self, groups: Sequence[TrainGroup], tokens_per_microbatch: int) -> list[list[Share]]:
        """Every rank's micro-batches within the budget; of one row each where a model needs that."""
        for role in (self.actor, self.critic, self.own_reference):
            tokens_per_microbatch = role.tokens_at_once(tokens_per_microbatch) if role else tokens_per_microbatch
        return plan_shares(groups, tokens_per_microbatch, self.ranks.size)

    def _micro_batches(self, plan: Sequence[Sequence[Share]]) -> Iterator[MicroBatch]:
        for shares in plan:
            share = shares[self.ranks.rank]
            micro_batch = self.actor.pack(share.groups)
            yield replace(micro_batch, is_idle=True) if share.is_idle else micro_batch


WEIGHTS_FILE = "weights.pt"
FOLDER = "critic"
"""Folder in a checkpoint."""


class Critic(TorchEngine):
    """A training engine whose outputs are values; it is never published."""

    role = "critic"

    def __init__(self, settings: ModelSettings, critic: CriticConfig, total_updates: int, ranks: Ranks = ALONE):
        super().__init__(settings, critic.optim, total_updates, ranks)
        self._has_folder = bool(critic.path)

    def _make_head(self) -> None:
        head = add_value_head(self.model, self.sharding.load_device)
        if self._has_folder:
            read_score_head(head, self.settings.model)
        self._fixed_tokens = fixed_tokens(self.model.get_output_embeddings().weight.shape[0], [])

    def values(self, micro_batch: MicroBatch) -> torch.Tensor:
        """[n] fp32 value of the state before each trained token."""
        self._sleeper.check_awake()
        return self.sharding.run(lambda: values(self.model, self._inputs(micro_batch), micro_batch.predict_from))

    def _fixed_logprobs(self) -> torch.Tensor:
        """Values of the fixed tokens, compared before sleeping and after waking."""
        with torch.no_grad():
            return self.values(self._fixed_micro_batch()).cpu()

    def files(self, *, copies: bool) -> Write:
        """Weights, masters, optimiser and schedule."""
        writes = (self.sharding.weights_files(WEIGHTS_FILE, copies=copies), super().files(copies=copies))

        def write(folder: Path) -> None:
            for each in writes:
                each(folder)

        return write

    def load(self, folder: Path) -> None:
        self.sharding.load_weights(folder / WEIGHTS_FILE)
        super().load(folder)
