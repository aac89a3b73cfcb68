"""Crash points for tests: `ASYNCRL_CRASH_AT=group.journaled:3` kills the process at the third pass of that point.

A process that dies by SIGKILL runs no handler and flushes nothing, as in a power cut of the container.
"""

from __future__ import annotations

import os
import signal

CRASH_POINTS = (
    # learner
    "tickets.journaled",
    "tickets.sent",
    "group.verified",
    "journal.segment_written",
    "group.journaled",
    "group.acknowledged",
    "step.consumed",
    "step.trained",
    "weights.publishing",
    "weights.filling",
    "checkpoint.writing",
    "checkpoint.renamed",
    "learner.asleep",
    "learner.waking",
    # rollout server
    "ticket.started",
    "group.sending",
    "group.sent",
    "weights.fetching",
    "weights.receiving",
    "weights.loading",
    "server.waking",
    "server.asleep",
)
VARIABLE = "ASYNCRL_CRASH_AT"


def _armed() -> dict[str, int]:
    """Passes left until the crash point that the environment names."""
    value = os.environ.get(VARIABLE, "")
    if not value:
        return {}
    name, _, count = value.partition(":")
    if name not in CRASH_POINTS:
        raise ValueError(f"{VARIABLE}={value}: the places are {', '.join(CRASH_POINTS)}")
    return {name: int(count or 1)}


_left = _armed()


def crash_point(name: str) -> None:
    """Kill this process if a test has armed this point; otherwise do nothing."""
    if name not in _left:
        return
    _left[name] -= 1
    if _left[name] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
