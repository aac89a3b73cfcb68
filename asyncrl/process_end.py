"""The end of a process: exit handlers, without taking loaded libraries apart; and the end of its parent."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

ENDING_S = 3.0
"""Time of threads and exit handlers after `main`. Together with the time that trackers have, less than a launcher gives
a service before it kills it."""
_PR_SET_PDEATHSIG = 1
# Loaded here: between fork and exec nothing may wait for a lock that another thread held.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def leave(code: int) -> NoReturn:
    """Exit after threads and atexit handlers, without unloading extension modules: those print their leaks then
    (nanobind, in triton) below the log's last line, or crash a run that is finished.

    After ENDING_S the process ends anyway: W&B waits 90 s for a server that does not answer.
    """
    patience = threading.Timer(ENDING_S, _quit, (code,))
    patience.daemon = True
    patience.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # it ends already, and an exit handler may be in the middle of it
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # as multiprocessing ends its processes
    atexit._run_exitfuncs()
    patience.cancel()
    _quit(code)


def _quit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # its reader has gone; None where it was closed before
            stream.flush()
    os._exit(code)


def die_with_parent(number: int) -> None:
    """Make the kernel send this signal to the child when its parent dies, even by SIGKILL. For `preexec_fn`."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
