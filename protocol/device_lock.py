"""The device lease: the one process that may touch the device now.

The kernel keeps it: a holder has `device.lease` in the run directory locked (flock), so a dead holder's lease comes
back when its process is gone and not before. The file says whose tenure it is. Each tenure has a *fence*, a number
larger than all before it; a number that is not newer has been overtaken and is refused.

`lease.jsonl` beside it is the trace: one line for each lease taken and each returned, in seconds of CLOCK_MONOTONIC,
which all processes of a machine share. A holder that dies leaves no line.

A holder may have processes that use the device for it. Each says so in `device.users` before it touches the device, and
the holder counts as alive until all of them have ended.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

LEASE_FILE = "device.lease"
TRACE_FILE = "lease.jsonl"
USERS_FILE = "device.users"
POLL_S = 0.01
"""Seconds between two attempts of a process that waits for the lease."""
_RECORD_BYTES = 512


class LeaseError(Exception):
    """The caller does not hold the lease; the message names the holder."""


class StaleFence(Exception):
    """The fence is not newer than the latest tenure."""


@dataclass(frozen=True)
class Tenure:
    """The newest holder, as recorded in the file."""

    fence: int
    holder: str
    pid: int
    born: str
    """Start of the process, in ticks since the machine's: the system reuses process ids."""
    since: float
    """Start of the tenure, in monotonic seconds."""
    held: bool
    """False once it was returned; a holder that died leaves it True."""


class DeviceLease:
    """Handle of one process on the device lock. Not thread-safe."""

    def __init__(self, folder: Path, holder: str):
        self.folder = folder
        self.holder = holder
        self.fence: int | None = None
        """Fence of this process's tenure; None while it holds no lease."""
        self._fd = -1

    def try_take(self, fence: int | None = None) -> bool:
        """Take the lease if it is free, under `fence` or the next number. Raises StaleFence."""
        assert self.fence is None, f"{self.holder} holds the lease already"
        self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as on_failure:
            # Not inherited by children: theirs would outlive us.
            fd = os.open(self.folder / LEASE_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            on_failure.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            last = _parse(os.pread(fd, _RECORD_BYTES, 0), self.folder / LEASE_FILE)
            if last is not None and last.held and _processes(self.folder, last):
                return False  # it is ending: its files are closed, its device memory may still be there
            newest = last.fence if last else 0
            if fence is not None and fence <= newest:
                raise StaleFence(f"the device was granted as fence {fence}, but fence {newest} has begun since")
            self.fence = fence or newest + 1
            self._record(fd, held=True)
            self._trace("taken")
            on_failure.pop_all()
            self._fd = fd
            return True

    def give_up(self) -> None:
        """Return the lease: other processes may take it from now on."""
        self.check()
        self._trace("returned")
        self._record(self._fd, held=False)
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # closing alone leaves it to children that were forked meanwhile
        os.close(self._fd)
        self._fd, self.fence = -1, None

    def check(self) -> None:
        """Raise LeaseError unless this process may touch the device."""
        if self.fence is None:
            raise LeaseError(f"{self.holder} may not touch the device: {describe(self.folder)}")

    def waited(self, waited_s: float, setting: str) -> str:
        """Timeout message; `setting` is the configuration key of the wait."""
        return f"{self.holder} waited {waited_s:g} s for the device ({setting}): {describe(self.folder)}"

    def forget(self) -> None:
        """Remove the files of a run that did not start; no-op unless this is the first tenure."""
        if self.fence == 1:
            for name in (LEASE_FILE, TRACE_FILE, USERS_FILE):
                (self.folder / name).unlink(missing_ok=True)
            os.close(self._fd)
            self._fd, self.fence = -1, None

    def _record(self, fd: int, *, held: bool) -> None:
        """Record this tenure, in one write of constant size: the file is never empty."""
        assert self.fence is not None
        pid = os.getpid()
        tenure = Tenure(self.fence, self.holder, pid, process_birth(pid) or "", time.monotonic(), held)
        os.pwrite(fd, json.dumps(asdict(tenure)).encode().ljust(_RECORD_BYTES), 0)

    def _trace(self, event: str) -> None:
        line = {"fence": self.fence, "holder": self.holder, "pid": os.getpid(), "event": event}
        _append(self.folder / TRACE_FILE, json.dumps({**line, "monotonic": time.monotonic()}))


def read_tenure(folder: Path) -> Tenure | None:
    """The newest tenure of any process; None if there was none."""
    with suppress(FileNotFoundError), (folder / LEASE_FILE).open("rb") as file:
        return _parse(file.read(_RECORD_BYTES), folder / LEASE_FILE)
    return None


def describe(folder: Path) -> str:
    """Describe the holder of the device, for messages."""
    tenure = read_tenure(folder)
    if tenure is None:
        return "no process has held it yet"
    who = f"{tenure.holder} (pid {tenure.pid}, fence {tenure.fence})"
    age_s = time.monotonic() - tenure.since
    if not tenure.held:
        return f"{who} returned it {age_s:.0f} s ago"
    alive = [os.getpid()] if tenure.pid == os.getpid() else _processes(folder, tenure)
    ended = "" if tenure.pid in alive else ", and has ended" + (f", but not its process {alive[0]}" if alive else "")
    return f"{who} has had it for {age_s:.0f} s{ended}"


def use_device_for(holder: int, folder: Path, user: int | None = None) -> None:
    """Register a process, this one or `user`, as one that uses the device for `holder`, whose tenures do not end before
    that process does."""
    user = user or os.getpid()
    folder.mkdir(parents=True, exist_ok=True)
    _append(folder / USERS_FILE, f"{holder} {process_birth(holder)} {user} {process_birth(user)}")


def _append(path: Path, line: str) -> None:
    """Append in one write: lines of several processes stay whole."""
    with open(path, "ab", buffering=0) as file:
        file.write(f"{line}\n".encode())


def _processes(folder: Path, tenure: Tenure) -> list[int]:
    """Other living processes of a tenure: the holder and those that use the device for it.

    A process that ends has given its device memory back.
    """
    if tenure.pid == os.getpid():
        return []
    named = [(tenure.pid, tenure.born)]
    with suppress(FileNotFoundError):
        for line in (folder / USERS_FILE).read_text(encoding="utf-8").splitlines():
            holder, holder_born, pid, born = line.split()
            if (int(holder), holder_born) == named[0]:
                named.append((int(pid), born))
    return [pid for pid, born in named if process_birth(pid) == born]


def _parse(record: bytes, path: Path) -> Tenure | None:
    if not record:
        return None
    try:
        return Tenure(**json.loads(record))
    except (ValueError, TypeError) as problem:
        raise LeaseError(
            f"{path} is damaged ({problem}). Stop every process of this run, remove the file, and resume"
        ) from problem


def process_birth(pid: int) -> str | None:
    """Start time of a process, as a text to compare; None if it has ended (also as a zombie)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None  # gone, or a system without /proc: the lock alone decides
    fields = stat[stat.rindex(b")") + 2 :].split()  # the name before it may hold spaces
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()
