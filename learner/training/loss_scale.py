"""Loss scaling for float16 (arXiv 1710.03740, sec. 3.2): gradients are those of the loss times a scale, so that small
ones are not lost below float16's smallest number, and are divided by it in the float32 of the masters.

The scale adapts: an update whose gradient is not finite is left out and halves it, and after many that were it doubles.
A power of two, it changes no bit of a gradient that neither overflows nor underflows.
"""

from __future__ import annotations

from asyncrl.errors import BadStateError

FIRST, LEAST, LARGEST = 2.0**16, 1.0, 2.0**24
GROWTH_UPDATES = 2000
"""Updates in a row with finite gradients after which the scale doubles."""


class LossScale:
    def __init__(self) -> None:
        self.value = FIRST
        self._good = 0

    def overflowed(self, grad_norm: float) -> dict[str, float]:
        """Halve the scale, and report. Raises BadStateError where it cannot fall any more: the gradient itself is not
        finite."""
        if self.value <= LEAST:
            raise BadStateError(
                f"the gradient norm is {grad_norm} at a loss scale of {self.value:g}, the least: it is not float16's "
                "range. The weights are those before this update. Look at the last samples and at logprob_diff_max in "
                "metrics.jsonl, or set model.dtype=bfloat16 in a new run"
            )
        self.value, self._good = self.value / 2, 0
        return {"loss_scale": self.value, "skipped_updates": 1.0}

    def went_well(self) -> dict[str, float]:
        """Count a finite gradient, and report."""
        self._good += 1
        if self._good >= GROWTH_UPDATES:
            self.value, self._good = min(LARGEST, 2 * self.value), 0
        return {"loss_scale": self.value, "skipped_updates": 0.0}

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "good": float(self._good)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self._good = state["value"], int(state["good"])
