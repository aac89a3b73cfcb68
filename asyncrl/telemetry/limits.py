"""Where panel and report draw their lines: where the alerts do, as far as a run directory can tell."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True)
class Limit:
    value: float
    hold_s: float = 0.0
    """How long it has to be beyond the value."""


LIMITS = {
    "LedgerResidual": Limit(0.0),
    "LearnerSilent": Limit(30.0, 60.0),
    "NoProgress": Limit(600.0, 60.0),
    "StalenessAtBound": Limit(0.9, 600.0),
    "EffectiveSampleSizeCollapse": Limit(0.5, 300.0),
    "MismatchKl": Limit(0.05, 300.0),
    "EntropyCollapse": Limit(0.02, 600.0),
    "RewardHacking": Limit(0.05, 600.0),
    "RewardsFail": Limit(0.05, 300.0),
    "LearnerStarves": Limit(0.8, 1800.0),
    "DiskFilling": Limit(2e9, 300.0),
}
"""By the alert in docker/prometheus/alerts.yml that watches for the same; a test compares the numbers."""
STARVES_AT_BOUND = 0.2
"""Idle ratio of a learner above which groups at their staleness bound mean that servers are slow."""
USUAL_STEPS = 5.0
"""Without a step for as long as so many usual ones, and for the least of `NoProgress`, a run is stuck."""
FIRST_STEP_S = 1800.0
"""The same of a process that has made none: kernels are compiled, and nobody knows how long a step takes."""
STANDARD_ERRORS = 2.0
"""By which held-out accuracy has to fall to be more than chance."""
NOT_IN_A_RUN_DIRECTORY = (
    "NoLearner",
    "RolloutServerSilent",
    "RolloutServerLost",
    "NoRolloutServer",
    "Restarting",
    "SharedMemorySmall",
)
"""Alerts about what only a live run can be asked. `RunStopped` and `NotANumber` need no limit."""


def longest_step_s(usual_s: float | None) -> float:
    """Longer without a step is too long. `usual_s`: seconds of this process' steps, None where it has made none."""
    return FIRST_STEP_S if usual_s is None else max(LIMITS["NoProgress"].value, USUAL_STEPS * usual_s)


def has_fallen(best: float, last: float, rows: float) -> bool:
    """Accuracies of two evaluations over so many rows: by more than the limit, and by more than chance."""
    error = sqrt(max(0.0, best * (1 - best) + last * (1 - last)) / rows)
    return best - last > max(LIMITS["RewardHacking"].value, STANDARD_ERRORS * error)
