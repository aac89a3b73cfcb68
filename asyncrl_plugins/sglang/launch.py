"""Entry of SGLang's processes: SGLang's own Python runs this file, and nothing else of ours is imported there.

The process group ends with the rollout server, also where that is killed.
"""

import ctypes
import multiprocessing
import os
import runpy
import select
import signal
import sys
import threading
from typing import Any

OWNER_VARIABLE = "ASYNCRL_ENGINE_OWNER"
"""Process id of the rollout server."""


PIDFD_OPEN = 434
"""Number of the system call on every architecture. `os.pidfd_open` is missing in a Python that was built for older
systems, such as uv's (astral-sh/python-build-standalone#193)."""


def pidfd_open(pid: int) -> int:
    """Return a descriptor that is readable once the process has ended. Raises ProcessLookupError if it has gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (descriptor := libc.syscall(PIDFD_OPEN, pid, 0)) < 0:
        raise OSError(ctypes.get_errno(), f"pidfd_open({pid}) failed")
    return descriptor


def end_with(owner: int) -> None:
    """Kill this process group when the rollout server ends, in whatever way."""
    try:
        fd = pidfd_open(owner)
    except ProcessLookupError:
        os.killpg(os.getpgrp(), signal.SIGKILL)
        return

    def watch() -> None:
        select.select([fd], [], [])  # readable when that process has ended
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-owner", daemon=True).start()


def fork_processes() -> None:
    """Let SGLang fork its processes, which it would spawn: each would import again what takes 20 s of processor time.
    CUDA allows no fork."""
    set_start_method: Any = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: set_start_method("fork", force=force)


if __name__ == "__main__":
    if sys.platform == "linux":
        end_with(int(os.environ[OWNER_VARIABLE]))
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        fork_processes()
    sys.path.pop(0)  # this folder: no module of ours is to be found under a name of SGLang's
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
