"""Entry of SGLang's processes: SGLang's own Python runs this file, and nothing else of ours is imported there.

The process group ends with the rollout server, also where that is killed.
"""

import os
import runpy
import select
import signal
import sys
import threading

OWNER_VARIABLE = "ASYNCRL_ENGINE_OWNER"
"""Process id of the rollout server."""


def end_with(owner: int) -> None:
    """Kill this process group when the rollout server ends, in whatever way."""
    try:
        fd = os.pidfd_open(owner)
    except ProcessLookupError:
        os.killpg(os.getpgrp(), signal.SIGKILL)
        return

    def watch() -> None:
        select.select([fd], [], [])  # readable when that process has ended
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-owner", daemon=True).start()


if __name__ == "__main__":
    if hasattr(os, "pidfd_open"):
        end_with(int(os.environ[OWNER_VARIABLE]))
    sys.path.pop(0)  # this folder: no module of ours is to be found under a name of SGLang's
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
