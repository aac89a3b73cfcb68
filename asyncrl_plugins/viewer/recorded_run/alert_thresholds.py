"""Thresholds of the alerts in docker/prometheus/alerts.yml, for the panel and the report, which see a run directory."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True)
class Threshold:
    value: float
    hold_s: float = 0.0
    """Seconds for which the value has to be exceeded."""


THRESHOLDS = {
    "LedgerResidual": Threshold(0.0),
    "LearnerSilent": Threshold(30.0, 60.0),
    "NoProgress": Threshold(600.0, 60.0),
    "StalenessAtBound": Threshold(0.9, 600.0),
    "EffectiveSampleSizeCollapse": Threshold(0.5, 300.0),
    "MismatchKl": Threshold(0.05, 300.0),
    "EntropyCollapse": Threshold(0.02, 600.0),
    "RewardHacking": Threshold(0.05, 600.0),
    "RewardsFail": Threshold(0.05, 300.0),
    "EnvironmentFails": Threshold(0.05, 300.0),
    "LearnerStarves": Threshold(0.8, 1800.0),
    "DiskFilling": Threshold(2e9, 300.0),
}
"""Keys are names of alerts; a test compares the numbers with the Prometheus rules, and names those without one."""
STARVES_AT_BOUND = 0.2
"""Idle ratio of a learner above which groups at their staleness bound mean that servers are slow."""
USUAL_STEPS = 5.0
"""A run is stuck after this many usual steps' time without a step, and not before the threshold of `NoProgress`."""
FIRST_STEP_S = 1800.0
"""Seconds after which a process without any step is stuck: kernels are compiled, and a step's time is not known yet."""
STANDARD_ERRORS = 2.0
"""Standard errors by which held-out accuracy has to fall to be more than chance."""


def longest_step_s(usual_s: float | None) -> float:
    """Seconds without a step that are too many. `usual_s`: this process' seconds per step, None before its first."""
    return FIRST_STEP_S if usual_s is None else max(THRESHOLDS["NoProgress"].value, USUAL_STEPS * usual_s)


def has_fallen(best: float, last: float, rows: float) -> bool:
    """True if accuracy over `rows` rows fell by more than the threshold, and by more than chance."""
    error = sqrt(max(0.0, best * (1 - best) + last * (1 - last)) / rows)
    return best - last > max(THRESHOLDS["RewardHacking"].value, STANDARD_ERRORS * error)
