"""Selections: tokens of a whole batch that are chosen before its first update.

A selection is `f(trajectories, credit, config) -> [N] bool`. Its row says what a chosen token leaves (`takes_from`,
asyncrl/config/method.py): the loss with all its terms, as with a mask of the correction; the policy
loss alone; or the batch, with its whole trajectory. Only the last changes a denominator. A policy loss may ask for a
selection's tokens as its `marks`, to treat them in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from asyncrl.algorithms.loading import load_method
from asyncrl.algorithms.trajectories import Credit, Trajectories
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.installed_methods import method_of
from asyncrl.config.methods import M2poConfig, TopEntropyConfig
from asyncrl.errors import UserError

Selection = Callable[[Trajectories, Credit, AlgorithmConfig], torch.Tensor]


def m2po(t: Trajectories, credit: Credit, config: AlgorithmConfig) -> torch.Tensor:
    """The fewest tokens, largest squared log-ratio of proximal to behaviour policy first, without which the mean
    squared log-ratio is below `algorithm.m2po.threshold` (M2PO, arXiv 2510.01161). One token always stays."""
    assert t.proximal_logprobs is not None
    squares = (t.proximal_logprobs - t.behaviour_logprobs).double() ** 2
    ascending, order = torch.sort(squares, stable=True)
    means = ascending.cumsum(0) / torch.arange(1, len(squares) + 1)
    threshold = config.settings_of(M2poConfig).threshold
    kept = max(int((means < threshold).sum()), 1)  # the running mean of ascending values never falls
    dropped = torch.zeros_like(squares, dtype=torch.bool)
    dropped[order[kept:]] = True
    return dropped


def top_entropy(t: Trajectories, credit: Credit, config: AlgorithmConfig) -> torch.Tensor:
    """All but the share `algorithm.top_entropy.fraction` of highest entropy, where completions fork: the others give no
    policy gradient (80/20, arXiv 2506.01939, eq. 5)."""
    assert t.entropies is not None
    if not len(t.entropies):
        return torch.zeros(0, dtype=torch.bool)
    fraction = config.settings_of(TopEntropyConfig).fraction
    return t.entropies < float(np.quantile(t.entropies.numpy(), 1 - fraction))


def overlong(t: Trajectories, credit: Credit, config: AlgorithmConfig) -> torch.Tensor:
    """Trajectories that were cut at `data.max_response_length`: nobody knows what they would have come to (overlong
    filtering, DAPO, section 3.4). Their scores stay in the statistics of their groups."""
    if t.is_truncated is None:
        return torch.zeros_like(t.row, dtype=torch.bool)
    return t.is_truncated[t.row]


# --- all selections of a run -----------------------------------------------------------------------


@dataclass(frozen=True)
class Selected:
    """Choices of the selections of a step. `N` runs over the batch's trained tokens."""

    from_loss: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[N] bool each, by the selections' names: tokens that add nothing to the loss."""
    from_policy_loss: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[N] bool each: tokens without policy loss."""
    from_batch: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[N] bool each: tokens of trajectories that are not trained."""
    marked: torch.Tensor | None = None
    """[N] bool: tokens that the policy loss treats apart, where it asks for marks."""

    def report(self) -> dict[str, float]:
        """Share of tokens that each selection takes, where the correction's own report has it not."""
        others = {**self.from_policy_loss, **self.from_batch}
        return {f"mask_fraction_{name}": float(taken.float().mean()) for name, taken in others.items() if len(taken)}


def any_of(chosen: Mapping[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """[N] bool: tokens that any of them has chosen; `like` [N] where there is none."""
    taken = torch.zeros_like(like, dtype=torch.bool)
    for tokens in chosen.values():
        taken = taken | tokens
    return taken


class Selections:
    """The selections of a configuration, and the one whose tokens its policy loss wants marked."""

    def __init__(self, config: AlgorithmConfig):
        self._config = config
        loss = method_of("policy_loss", config.policy_loss)
        self._marks = loss.marks if loss else ""
        names = dict.fromkeys((*config.selections, *filter(None, [self._marks])))
        self._functions: dict[str, Selection] = {
            name: load_method("selection", name, "algorithm.selections") for name in names
        }

    def __call__(self, t: Trajectories, credit: Credit) -> Selected:
        """Inserted tokens are never chosen, and enter no statistic, but of selections that need them."""
        sampled = ~t.provenance.is_inserted if t.provenance else torch.ones_like(t.row, dtype=torch.bool)
        of_policy = t, credit
        if not sampled.all():
            of_policy = t.only(sampled), Credit(credit.advantages[sampled])
        chosen: dict[str, torch.Tensor] = {}
        for name in self._functions:
            method = method_of("selection", name)
            if method and "inserted" in method.needs:
                chosen[name] = self._choose(name, t, credit)
                continue
            chosen[name] = torch.zeros_like(sampled)
            chosen[name][sampled] = self._choose(name, *of_policy)
        kinds: dict[str, dict[str, torch.Tensor]] = {"loss": {}, "policy_loss": {}, "batch": {}}
        for name in self._config.selections:
            method = method_of("selection", name)
            kinds[method.takes_from if method else "loss"][_short(name)] = chosen[name]
        kinds["batch"] = {name: _whole_rows(tokens, t) for name, tokens in kinds["batch"].items()}
        return Selected(kinds["loss"], kinds["policy_loss"], kinds["batch"], chosen.get(self._marks))

    def _choose(self, name: str, t: Trajectories, credit: Credit) -> torch.Tensor:
        chosen = self._functions[name](t, credit, self._config)
        if chosen.shape != t.row.shape or chosen.dtype != torch.bool:
            raise UserError(
                f"algorithm.selections: {name} returned {tuple(chosen.shape)} of {chosen.dtype}, but there are "
                f"{len(t.row)} trained tokens: return a bool for each"
            )
        return chosen


def _short(name: str) -> str:
    """A user's own selection is reported under its function's name."""
    return name.rpartition(":")[2]


def _whole_rows(tokens: torch.Tensor, t: Trajectories) -> torch.Tensor:
    """[N] bool: all tokens of rows that have a chosen one."""
    rows = torch.zeros(len(t.scores), dtype=torch.bool)
    rows[t.row[tokens]] = True
    return rows[t.row]
