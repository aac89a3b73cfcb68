"""Crash points for tests: `ASYNCRL_CRASH_AT=group.journaled:3` kills the process at the third pass of that point.

A process that dies by SIGKILL runs no handler and flushes nothing, as in a power cut of the container.
`ASYNCRL_SLOW_AT=checkpoint.writing:3` makes each pass of a slow point take three seconds, as a slow disk would.
"""

from __future__ import annotations

import os
import signal
import time

VARIABLE = "ASYNCRL_CRASH_AT"
SLOW_VARIABLE = "ASYNCRL_SLOW_AT"


def _armed() -> dict[str, int]:
    """Passes left until the crash point that the environment names."""
    value = os.environ.get(VARIABLE, "")
    if not value:
        return {}
    name, _, count = value.partition(":")
    return {name: int(count or 1)}


_left = _armed()


def crash_point(name: str) -> None:
    """Kill this process if a test has armed this point; otherwise do nothing."""
    if name not in _left:
        return
    _left[name] -= 1
    if _left[name] == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def slow_point(name: str) -> None:
    """Wait here if a test has asked for it; otherwise do nothing."""
    slow, _, seconds = os.environ.get(SLOW_VARIABLE, "").partition(":")
    if slow == name:
        time.sleep(float(seconds))
