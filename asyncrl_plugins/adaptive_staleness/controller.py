"""A staleness bound that moves with what the steps measure.

A larger bound keeps the learner from waiting; a smaller one keeps the samples close to the policy. A step
speaks for a smaller bound where the effective sample size is below `ess_low` or the mismatch KL above `kl_high`, for a
larger one where the sample size is above `ess_high` and the KL below `kl_low`, and for neither in between (hysteresis).
`patience` such steps in a row move the bound by one. Samples of the old bound are still in the pipeline then, so that
the next `bound + 1` steps are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from asyncrl_plugins.adaptive_staleness.plugin import AdaptiveStalenessConfig


class AdaptiveStaleness:
    """A bound between a smallest one and learner.max_staleness, moved by effective sample size and mismatch KL.

    Pure arithmetic: no clock, no I/O. Not thread-safe.

    >>> adaptive = AdaptiveStaleness(AdaptiveStalenessConfig(min=1, patience=1), 4)
    >>> adaptive.observe(ess=0.99, mismatch_kl=0.001), adaptive.bound
    (True, 2)
    """

    def __init__(self, config: AdaptiveStalenessConfig, largest: int):
        """`largest`: learner.max_staleness."""
        self._config = config
        self._largest = largest
        self.bound = config.min
        """The staleness bound by which new tickets are admitted, within [min, largest]."""
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
        return min(max(bound, self._config.min), self._largest)

    def state(self) -> dict[str, int]:
        """State for the checkpoint."""
        return {"bound": self.bound, "in_a_row": self._in_a_row, "settling": self._settling}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue from `state()`; a bound outside today's limits is moved to the nearest one inside."""
        self.bound = self._limited(int(state["bound"]))
        self._in_a_row, self._settling = int(state["in_a_row"]), int(state["settling"])
