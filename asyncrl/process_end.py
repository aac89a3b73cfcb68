"""The end of a process: threads and exit handlers, without taking loaded libraries apart."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

ENDING_S = 3.0
"""Time of threads and exit handlers after `main`. Together with the time that trackers have, less than a launcher gives
a service before it kills it."""


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
