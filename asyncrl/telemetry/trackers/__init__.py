"""TensorBoard and Weights & Biases behind one interface.

To add one: a class that is a `Tracker`, its name in `Tracker` of asyncrl/config/run_sections.py and in `OPENERS`,
and its package in an extra of the same name.
"""

from __future__ import annotations

from asyncrl.telemetry.trackers.threads import OPENERS, Trackers, check_trackers, open_trackers
from asyncrl.telemetry.trackers.tracker import Sample, TrackedRun, Tracker

__all__ = ["OPENERS", "Sample", "TrackedRun", "Tracker", "Trackers", "check_trackers", "open_trackers"]
