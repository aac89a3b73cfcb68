"""The arithmetic of the staleness bound: the check at consumption, and the bound of `learner.max_staleness: auto`.

A larger bound keeps the learner from waiting; a smaller one keeps the samples close to the policy. Under `auto` a step
speaks for a smaller bound where the effective sample size is below `ess_low` or the mismatch KL above `kl_high`, for a
larger one where the sample size is above `ess_high` and the KL below `kl_low`, and for neither in between (hysteresis).
`patience` such steps in a row move the bound by one. Samples of the old bound are still in the pipeline then, so that
the next `bound + 1` steps are not judged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from asyncrl.config.sections import AdaptiveStalenessConfig, OnStale
from asyncrl.errors import BadStateError
from learner.tickets.ticket import ReceivedGroup

ADAPTIVE_STALENESS = "adaptive_staleness"
"""Name of the controller in a checkpoint."""


def crowded_deadline(due: Iterable[int], version: int, per_step: int) -> int | None:
    """The first deadline by which more groups are due, after a step at `version`, than the steps until then take."""
    total = 0
    for deadline, count in sorted(Counter(due).items()):
        total += count
        if total > max(0, deadline - version) * per_step:
            return deadline
    return None


def has_fresh_tokens(item: ReceivedGroup, version: int, *, all_of_them: bool) -> bool:
    """Whether all, or else any, of the sampled tokens are within the ticket's bound at `version`."""
    fresh = version - item.group.versions[item.group.loss_mask == 1] <= item.slot.bound
    return bool(np.all(fresh) if all_of_them else np.any(fresh) or not fresh.size)


def within_bound(item: ReceivedGroup, version: int, on_stale: OnStale) -> ReceivedGroup:
    """Check the bound at consumption. Under `mask`, tokens over the bound leave the loss; else there are none."""
    if version - item.oldest_version <= item.slot.bound:
        return item
    if on_stale != "mask":
        raise BadStateError(
            f"ticket {item.ticket.ticket_id} has a token of version {item.oldest_version} at version {version}: over "
            f"the staleness bound {item.slot.bound}. Admission should have prevented it: please report this run's logs"
        )
    fresh = version - item.group.versions <= item.slot.bound
    return replace(item, group=item.group.model_copy(update={"loss_mask": item.group.loss_mask * fresh}))


class AdaptiveStaleness:
    """Pure arithmetic: no clock, no I/O. Not thread-safe.

    >>> adaptive = AdaptiveStaleness(AdaptiveStalenessConfig(min=1, max=4, patience=1))
    >>> adaptive.observe(ess=0.99, mismatch_kl=0.001), adaptive.bound
    (True, 2)
    """

    def __init__(self, config: AdaptiveStalenessConfig):
        self._config = config
        self.bound = config.min
        """The staleness bound by which new tickets are admitted, within [min, max]."""
        self._in_a_row = 0
        """Steps that agreed: positive for a larger bound, negative for a smaller one."""
        self._settling = 0
        """Steps that are not judged yet, because the bound has just moved."""

    def observe(self, ess: float, mismatch_kl: float) -> bool:
        """Take one learner step's effective sample size and mismatch KL (k3). True when the bound has moved.

        A step without a measurement (NaN) says nothing.
        """
        if self._settling > 0:
            self._settling -= 1
            return False
        if math.isnan(ess) or math.isnan(mismatch_kl):
            return False
        direction = self._direction(ess, mismatch_kl)
        agrees = direction != 0 and self._in_a_row * direction >= 0
        self._in_a_row = self._in_a_row + direction if agrees else direction
        if abs(self._in_a_row) < self._config.patience:
            return False
        self._in_a_row = 0
        wanted = self._limited(self.bound + direction)
        if wanted == self.bound:
            return False
        self._settling = max(wanted, self.bound) + 1
        self.bound = wanted
        return True

    def _direction(self, ess: float, mismatch_kl: float) -> int:
        c = self._config
        if ess < c.ess_low or mismatch_kl > c.kl_high:
            return -1
        return 1 if ess > c.ess_high and mismatch_kl < c.kl_low else 0

    def _limited(self, bound: int) -> int:
        return min(max(bound, self._config.min), self._config.max)

    def state(self) -> dict[str, int]:
        """State for the checkpoint."""
        return {"bound": self.bound, "in_a_row": self._in_a_row, "settling": self._settling}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue from `state()`; a bound outside today's limits is moved to the nearest one inside."""
        self.bound = self._limited(int(state["bound"]))
        self._in_a_row, self._settling = int(state["in_a_row"]), int(state["settling"])
