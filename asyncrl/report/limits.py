"""Where a report draws its lines: where the alerts do, as far as a run directory can tell."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    value: float
    hold_s: float = 0.0
    """How long it has to be beyond the value."""


LIMITS = {
    "LedgerResidual": Limit(0.0),
    "LearnerSilent": Limit(30.0, 60.0),
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
NOT_IN_A_RUN_DIRECTORY = ("NoLearner", "RolloutServerSilent", "NoRolloutServer", "SharedMemorySmall")
"""Alerts about what only a live run can be asked. `RunStopped` and `NotANumber` need no limit."""
SERVERS_IDLE = 0.8
TRUNCATED = 0.25
ZERO_VARIANCE = 0.5
RESTARTS = 3
