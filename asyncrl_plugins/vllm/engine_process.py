"""Names and lifetime that vLLM's own processes share with the rollout server.

No engine process outlives its rollout server, nor holds a device that the server has no lease of. Imports nothing of
vLLM: the server names here what those processes read.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path

from asyncrl.workers.reaper import pidfd_open

BACKEND = "asyncrl"
"""Name of `worker.WeightTransfer` in vLLM's table of weight-transfer backends."""
BANNED_KEY = "asyncrl_banned_token_ids"
"""Key of the ids that can never be sampled, in vLLM's `additional_config`."""
OWNER_VARIABLE = "ASYNCRL_ENGINE_OWNER"
"""Process id of the rollout server, in the environment of the processes that vLLM starts."""
MODULES_VARIABLE = "ASYNCRL_ENGINE_MODULES"
"""Modules that these processes import before they load the model, in the same environment."""
LEASE_VARIABLE = "ASYNCRL_DEVICE_LEASE"
"""Folder of the device lease, in the same environment; only where the device is shared."""


def import_modules() -> None:
    """Import the modules of MODULES_VARIABLE, which add to vLLM's tables."""
    for module in os.environ.get(MODULES_VARIABLE, "").split():
        import_module(module)


def belong_to_owner() -> None:
    """End with the rollout server, and register as a user of its device; called before the device is touched."""
    die_with_owner()
    folder, owner = os.environ.get(LEASE_VARIABLE), int(os.environ.get(OWNER_VARIABLE, "0"))
    if folder and owner not in (0, os.getpid()):
        from protocol.device_lock import use_device_for

        use_device_for(owner, Path(folder))


def die_with_owner() -> None:
    """Kill this process when its rollout server ends, also by SIGKILL: vLLM's processes may stay for ever.

    A worker of several has vLLM's core between itself and the server, and kills it, too.
    """
    owner = int(os.environ.get(OWNER_VARIABLE, "0"))
    if owner in (0, os.getpid()) or sys.platform != "linux":
        return
    between = os.getppid()
    try:
        fd = pidfd_open(owner)
    except ProcessLookupError:
        _die(owner, between)
        return

    def watch() -> None:
        select.select([fd], [], [])  # readable when that process has ended
        _die(owner, between)

    threading.Thread(target=watch, name="die-with-owner", daemon=True).start()


def _die(owner: int, between: int) -> None:
    if between != owner and os.getppid() == between != 1:
        os.kill(between, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
