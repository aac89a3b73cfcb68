"""The teachers of a run, and the pass in which they score a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from asyncrl.models.output_head import Asked, Comparison
from asyncrl_plugins.distillation.divergence import class_logprobs, likeliest
from learner.training.engine import TorchEngine
from learner.training.rank_plan import Share, plan_shares

if TYPE_CHECKING:
    from learner.training.batch import Batch
    from learner.training.packing import MicroBatch
    from learner.training.roles import Roles


@dataclass(frozen=True)
class TeacherTokens:
    """Scores of a batch's `N` trained tokens by their teachers, fp32 on the CPU."""

    logprobs: torch.Tensor
    """[N] of the tokens that were sampled."""
    ids: torch.Tensor
    """[N, k] int64: the teacher's likeliest tokens."""
    classes: torch.Tensor
    """[N, k + 1] log-probs of these, and last of all other tokens together."""


class Teachers:
    """The reference policy as a teacher."""

    def __init__(self, roles: Roles, *, top_k: int):
        """`top_k` tokens of each distribution are wanted; with 0 only those that were sampled."""
        self._roles = roles
        reference = roles.reference
        packing = reference if isinstance(reference, TorchEngine) else roles.actor
        self._teachers = [(reference, packing)]
        sizes = [engine.facts.vocabulary for engine in (roles.actor, *(packing for _, packing in self._teachers))]
        self._known = min(sizes)
        """Ids below this one are in all vocabularies: what a larger one has beyond them is among the others."""
        self._top_k = min(top_k, self._known)

    @torch.no_grad()
    def score(self, batch: Batch, tokens_per_microbatch: int) -> TeacherTokens:
        """Score all trained tokens. A collective."""
        k = self._top_k
        table = torch.zeros(len(batch.trained.row), 1 + (2 * k + 1 if k else 0))
        asked: Asked = {"comparison": Comparison(self._classes)} if k else {}
        for teacher, packing in self._teachers:
            budget = packing.tokens_at_once(tokens_per_microbatch)
            plan = plan_shares(batch.train_groups, budget, self._roles.ranks.size)
            with teacher.on_device():
                for micro_batch in self._roles.work.of(self._micro_batches(packing, plan)):
                    outputs = teacher.forward(micro_batch, **asked)
                    if not micro_batch.is_idle:
                        place = batch.places(micro_batch.row, micro_batch.column)
                        compared = () if outputs.compared is None else (outputs.compared,)
                        table[place] = torch.cat([outputs.logprobs[:, None], *compared], dim=1).cpu()
        table = self._roles.ranks.sum_columns({"said": table})["said"]
        return TeacherTokens(table[:, 0], table[:, 1 : 1 + k].long(), table[:, 1 + k :])

    def _classes(self, logprobs: torch.Tensor) -> torch.Tensor:
        """[n, V] -> [n, 2 k + 1]: ids as numbers, which fp32 has exactly up to 2^24, and log-probs of their classes."""
        ids = likeliest(logprobs[:, : self._known], self._top_k)
        return torch.cat([ids.to(logprobs.dtype), class_logprobs(logprobs, ids)], dim=1)

    def _micro_batches(self, packing: TorchEngine, plan: Sequence[Sequence[Share]]) -> Iterator[MicroBatch]:
        for shares in plan:
            share = shares[self._roles.ranks.rank]
            yield replace(packing.pack(share.groups), is_idle=share.is_idle)
