"""Trackers: programs of plug-ins (`asyncrl.trackers`) that show a run.

The implementation of a tracker's description is a class that is a `Tracker`.
"""

from __future__ import annotations

from asyncrl.telemetry.trackers.threads import Trackers, check_trackers, open_trackers, openers_of
from asyncrl.telemetry.trackers.tracker import Sample, TrackedRun, Tracker, numbers

__all__ = [
    "Sample",
    "TrackedRun",
    "Tracker",
    "Trackers",
    "check_trackers",
    "numbers",
    "open_trackers",
    "openers_of",
]
