"""A guardian process around each worker: when either the worker or the pool ends, nothing of it survives.

    pool's process  --stdin-->  guardian  --fork-->  worker (own session)  -->  whatever the reward starts

The guardian runs no user code. It waits until the worker ends, or the pool's end of the pipe closes
(also by `kill -9`), then kills the worker's process group and, as their reaper, every descendant that
had left that group. It exits the way the worker did, so that the pool sees the worker's signal or code.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from contextlib import suppress

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def fork_guarded() -> None:
    """Return in a child process with a session of its own; the calling process becomes its guardian.

    Stdin must be the pool's pipe. The guardian only watches it for closing and reads nothing.
    """
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    guardian = os.getpid()
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, _only_wake)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Closing of stdin is not enough where the pool's process has forked children that hold the other end.
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    worker = os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.close(wake_read)
        os.close(wake_write)
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(1)
        return
    os.dup2(2, 1)  # give up the reply pipe: its end must mean the worker's end
    _exit_like(_guard(worker, wake_read))


def _guard(worker: int, wake_read: int) -> int:
    """Wait for the end of the worker or the pool, kill what is left, return the worker's wait status."""
    poller = select.poll()
    poller.register(0, 0)  # POLLHUP is always reported
    poller.register(wake_read, select.POLLIN)
    status: int | None = None
    stop = False
    while status is None and not stop:
        for fd, _ in poller.poll():
            stop |= fd != wake_read or signal.SIGTERM in os.read(wake_read, 4096)
        status = _reap(worker)
    with suppress(ProcessLookupError, PermissionError):  # an empty group, or one of zombies on macOS
        os.killpg(worker, signal.SIGKILL)
    if status is None:  # perhaps so young that it has no group of its own yet
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    while True:
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                child.kill()
        try:
            child, ended = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        if child == worker:
            status = ended
    return status if status is not None else 0


def _reap(worker: int) -> int | None:
    """Collect processes that ended, among them orphans of the worker; return the worker's status if it did."""
    with suppress(ChildProcessError):
        while True:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == worker:
                return status
            if child == 0:
                break
    return None


def _exit_like(status: int) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


def _only_wake(number: int, frame: object) -> None:
    """The wake-up pipe carries the signal's number to the loop."""


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return  # process groups and the closing of stdin still end the worker
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")
