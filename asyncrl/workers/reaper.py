"""A reaper process around each worker: when either the worker or its parent ends, nothing of it survives.

    parent  --stdin-->  reaper  --fork-->  worker (own session)  -->  whatever user code starts

The reaper runs no user code. It waits until the worker ends, the parent closes its end of the pipe, or the parent
ends (its forks may hold the pipe). Then it kills every descendant: as their reaper it also finds those that have left
the worker's session. It exits the way the worker did, so that the parent sees the worker's signal or code.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
from contextlib import suppress

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PIDFD_OPEN = 434
"""Number of the system call on every architecture. `os.pidfd_open` is missing in a Python that was built for older
systems, such as uv's (astral-sh/python-build-standalone#193)."""
COLLECT_EVERY_MS = 1000
"""Time between looks at orphans of the worker that have ended."""


def limit_memory(mib: int) -> None:
    """Bound this process's address space, within what it may have anyway."""
    limit, hard = mib << 20, resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def memory_limit_mib() -> int:
    return resource.getrlimit(resource.RLIMIT_AS)[0] >> 20


def pidfd_open(pid: int) -> int:
    """Return a descriptor that is readable once the process has ended. Raises ProcessLookupError if it has gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (descriptor := libc.syscall(PIDFD_OPEN, pid, 0)) < 0:
        raise OSError(ctypes.get_errno(), f"pidfd_open({pid}) failed")
    return descriptor


def fork_guarded() -> None:
    """Return in a child process with a session of its own; the calling process becomes its reaper.

    Stdin must be the parent's pipe. The reaper only watches it for closing and reads nothing.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reaper = os.getpid()
    ends = select.poll()
    ends.register(0, 0)  # POLLHUP is always reported
    ends.register(pidfd_open(os.getppid()), select.POLLIN)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if worker == 0:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != reaper:
            os._exit(1)
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.dup2(2, 1)  # give up the reply pipe: its end must mean the worker's end
    ends.register(pidfd_open(worker), select.POLLIN)
    status = None
    while status is None and not ends.poll(COLLECT_EVERY_MS):
        status = _collect_ended(worker)
    _exit_like(_kill_descendants(worker, status))


def _collect_ended(worker: int) -> int | None:
    """Collect children that have ended, orphans of the worker among them; return the worker's wait status."""
    child = -1
    with suppress(ChildProcessError):
        while child:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == worker:
                return status
    return None


def _kill_descendants(worker: int, status: int | None) -> int:
    """Kill and collect all children, and those that become ours by it; return the worker's wait status."""
    while children := psutil.Process().children():
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        ended, code = os.waitpid(-1, 0)
        status = code if ended == worker else status
    return status or 0


def _exit_like(status: int) -> None:
    if os.WIFSIGNALED(status):
        with suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")
