"""Trajectories of a learner step as advantage estimators and selections see them, and the credit that they are given.

`B` rows are trajectories, those without a score and those that train nothing included. `N` runs over the trained tokens
of all rows, row after row; everything is detached fp32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch

from asyncrl.algorithms.provenance import Provenance

OF_TOKENS = frozenset(
    [
        "row",
        "behaviour_logprobs",
        "token_rewards",
        "turn",
        "turn_rewards",
        "state",
        "proximal_logprobs",
        "entropies",
        "squared_probabilities",
        "values",
        "reference_logprobs",
    ]
)
"""Columns of Trajectories that run over tokens; the others are of rows."""


@dataclass(frozen=True)
class Trajectories:
    """A batch before its first update. Columns that default to None are there where a method `needs` them."""

    scores: torch.Tensor
    """[B] sum of a row's rewards; NaN where it could not be scored: such a row takes part in no statistic."""
    group: torch.Tensor
    """[B] int64: rows of one prompt have one number."""
    row: torch.Tensor
    """[N] int64, ascending."""
    behaviour_logprobs: torch.Tensor
    """[N] as the engine reported them."""
    components: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[B] each: what the reward functions said, by their names; NaN where a row could not be scored."""
    component_weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the components in the score."""
    token_rewards: torch.Tensor | None = None
    """[N] rewards where they are earned; None: those of turns where these end, and what else is in a score at its row's
    last trained token."""
    outcomes: torch.Tensor | None = None
    """[B] scores without what the environment gave for turns; None: the scores, for nothing was given."""
    turn: torch.Tensor | None = None
    """[N] int64 number in its row of the turn of each token; None: one turn each."""
    turn_rewards: torch.Tensor | None = None
    """[N] what the environment gave for a turn, at the turn's last trained token; None: nothing."""
    state: torch.Tensor | None = None
    """[N] int64 the environment's state in which the token's turn began: equal numbers in a group are equal states,
    0 is that of the prompt, and -1 is not known; None: only the prompt's are."""
    provenance: Provenance[torch.Tensor] | None = None
    """Provenance of the tokens and of the rows; None: the policy sampled all tokens, and all rows are trained."""
    is_truncated: torch.Tensor | None = None
    """[B] bool: rows that ended at the largest length and not by a stop token; None: there are none."""
    proximal_logprobs: torch.Tensor | None = None
    """[N] of the learner's policy at the start of the step."""
    entropies: torch.Tensor | None = None
    """[N] of that policy's distribution, nats."""
    squared_probabilities: torch.Tensor | None = None
    """[N] sum over the vocabulary of that policy's squared probabilities."""
    values: torch.Tensor | None = None
    """[N] the critic's, of the state before each token."""
    reference_logprobs: torch.Tensor | None = None
    """[N] of the reference policy."""
    seed: int = 0
    """Seed of random draws; equal for a step that is recomputed."""

    @cached_property
    def lengths(self) -> torch.Tensor:
        """[B] number of trained tokens."""
        return torch.bincount(self.row, minlength=len(self.scores))

    @cached_property
    def place(self) -> torch.Tensor:
        """[N] place of each token among its row's trained tokens, from 0."""
        return torch.arange(len(self.row)) - (self.lengths.cumsum(0) - self.lengths)[self.row]

    @cached_property
    def rewards(self) -> torch.Tensor:
        """[N] reward of each token."""
        if self.token_rewards is not None:
            return self.token_rewards
        last = self.place == self.lengths[self.row] - 1
        at_the_end = self.scores if self.outcomes is None else self.outcomes
        rewards = torch.where(last, at_the_end[self.row], 0.0)
        return rewards if self.turn_rewards is None else rewards + self.turn_rewards

    def only(self, tokens: torch.Tensor) -> Trajectories:
        """Trajectories with the given tokens alone: [N] bool."""
        columns = {f.name: getattr(self, f.name) for f in fields(self) if f.name in OF_TOKENS}
        return replace(
            self,
            provenance=self.provenance and self.provenance.of_tokens(tokens),
            **{name: column[tokens] for name, column in columns.items() if column is not None},
        )

    def of_policy(self) -> Trajectories:
        """Trajectories without inserted tokens, and without the scores of demonstrations."""
        if self.provenance is None:
            return self
        unscored = self.provenance.is_demonstration
        return replace(
            self.only(~self.provenance.is_inserted),
            scores=torch.where(unscored, torch.nan, self.scores),
            components={name: torch.where(unscored, torch.nan, c) for name, c in self.components.items()},
        )

    def share(self, rows: torch.Tensor) -> Credit:
        """Give every token of a row the row's advantage: [B] -> credit."""
        return Credit(rows[self.row])

    def padded(self, tokens: torch.Tensor) -> torch.Tensor:
        """One line for each row, zeros behind its tokens: [N] -> [B, T], T the largest length."""
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        lines = torch.zeros(len(self.scores), longest, dtype=tokens.dtype)
        lines[self.row, self.place] = tokens
        return lines

    def flat(self, lines: torch.Tensor) -> torch.Tensor:
        """[B, T] -> [N], the inverse of `padded`."""
        return lines[self.row, self.place]


@dataclass(frozen=True)
class Credit:
    """Result of an estimator."""

    advantages: torch.Tensor
    """[N]"""
    returns: torch.Tensor | None = None
    """[N] targets of the critic, where there is one."""

    def spread(self, kept: torch.Tensor) -> Credit:
        """The credit of these tokens, and 0 for the others. [N] bool"""
        advantages = torch.zeros(kept.shape, dtype=self.advantages.dtype)
        advantages[kept] = self.advantages
        return Credit(advantages)


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each row's group over its scored rows, [B] each; an unscored row has 0 in each."""

    centred: torch.Tensor
    """Score minus the group's mean."""
    mean: torch.Tensor
    std: torch.Tensor
    """Unbiased."""
    count: torch.Tensor
    """Number of scored rows."""


def group_statistics(scores: torch.Tensor, group: torch.Tensor, weights: torch.Tensor | None = None) -> GroupStatistics:
    """Mean, standard deviation and size of groups, computed in fp64. [B], [B] -> [B] each

    `weights` [B]: of the rows in the mean; equal where there are none.
    """
    scored = ~scores.isnan()
    known = torch.where(scored, scores, 0.0).double()
    share = scored.double() if weights is None else scored * weights.double()
    _, place = torch.unique(group, return_inverse=True)
    zeros = torch.zeros(int(place.max()) + 1 if len(place) else 0, dtype=torch.float64)
    count = zeros.index_add(0, place, scored.double())
    total = zeros.index_add(0, place, share)
    mean = zeros.index_add(0, place, known * share) / torch.where(total > 0, total, 1.0)
    centred = torch.where(scored, known - mean[place], 0.0)
    variance = zeros.index_add(0, place, centred**2) / (count - 1).clamp_min(1)
    by_row = (centred, mean[place], variance.sqrt()[place], count[place])
    return GroupStatistics(*(torch.where(scored, values, 0.0).float() for values in by_row))
