"""No engine process outlives its rollout server. Imports nothing of vLLM."""

from __future__ import annotations

import os
import select
import signal
import threading

OWNER_VARIABLE = "ASYNCRL_ENGINE_OWNER"
"""Process id of the rollout server, in the environment of the processes that vLLM starts."""


def die_with_owner() -> None:
    """Kill this process as soon as its owner is gone, also by SIGKILL: vLLM's processes may stay for ever."""
    owner = int(os.environ.get(OWNER_VARIABLE, "0"))
    if owner in (0, os.getpid()) or not hasattr(os, "pidfd_open"):
        return
    try:
        fd = os.pidfd_open(owner)
    except ProcessLookupError:
        _die()
        return

    def watch() -> None:
        select.select([fd], [], [])  # readable when that process has ended
        _die()

    threading.Thread(target=watch, name="die-with-owner", daemon=True).start()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
