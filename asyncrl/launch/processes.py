"""The services as child processes: started together, watched, and never left behind."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from asyncrl.config.schema import RunConfig

logger = logging.getLogger(__name__)

STOP_S = 15.0
"""Time a service has to end after SIGTERM before it is killed."""
POLL_S = 0.2
LAST_LINES = 30
_PR_SET_PDEATHSIG = 1
# Loaded here: between fork and exec nothing may wait for a lock that another thread held.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass
class Service:
    """One child process and its log."""

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    _group_is_gone: bool = False

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,  # Ctrl-C reaches us alone; we decide the order of stopping
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )

    @property
    def code(self) -> int | None:
        return self.process.poll() if self.process else None

    def terminate(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.terminate()

    def kill(self) -> None:
        """The whole tree: descendants in sessions of their own while the parent lives, and in any case its group."""
        if self.process is None or self._group_is_gone:
            return
        if self.process.poll() is None:
            family: list[psutil.Process] = []
            with contextlib.suppress(psutil.NoSuchProcess):
                family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            self.process.wait()
        # A service that crashed leaves its children in the group that it led.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._group_is_gone = True  # from now on the system may give the number to somebody else

    def ending(self) -> str:
        """How it ended, in words; nobody knows that -9 may mean that memory ran out."""
        if self.code is None or self.code >= 0:
            return f"{self.name} ended with code {self.code}"
        name = signal.Signals(-self.code).name
        return f"{self.name} was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")

    def last_words(self) -> str:
        """The user's mistake, from its last `error:` line on, where it is one; else the last lines of the log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        return "\n".join(lines[errors[-1] :] if self.code == 2 and errors else lines[-LAST_LINES:])


@dataclass(frozen=True)
class Outcome:
    code: int
    """Exit code of the whole run: 0, 1, 2 or 130."""
    failed: Service | None = None
    """The side that ended the run."""


class Supervisor:
    """Runs the learner and the rollout server until the learner is done or either fails."""

    def __init__(self, learner: Service, rollout: Service, *, stop_s: float = STOP_S):
        self.learner = learner
        self.rollout = rollout
        self._stop_s = stop_s
        self._interrupts = 0

    def run(self, on_tick: Callable[[], None] = lambda: None) -> Outcome:
        """Returns when both are gone. The first SIGINT or SIGTERM stops them cleanly, a second one kills them."""
        previous = {number: signal.signal(number, self._interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for service in (self.learner, self.rollout):
                service.start()
            return self._watch(on_tick)
        finally:
            # Nothing is left to stop unless we ourselves failed: then, too, both may end in order.
            self._stop(self.learner, self.rollout)
            for service in (self.learner, self.rollout):
                service.kill()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _interrupted(self, *_: object) -> None:
        self._interrupts += 1

    def _watch(self, on_tick: Callable[[], None]) -> Outcome:
        while True:
            on_tick()
            if self._interrupts:
                self._stop(self.learner, self.rollout)
                return Outcome(130)
            if self.learner.code == 0:
                self._wait_or_stop(self.rollout)
                on_tick()
                return Outcome(0)
            for service, other in ((self.learner, self.rollout), (self.rollout, self.learner)):
                # The server may end in order before the learner does: it was told goodbye.
                if service.code and not self._blames(other):
                    self._stop(other)
                    return Outcome(2 if service.code == 2 else 1, failed=service)
            time.sleep(POLL_S)

    def _blames(self, other: Service) -> bool:
        """Give the other side a moment: when both end, the one with a message for the user counts."""
        deadline = time.monotonic() + 2 * POLL_S
        while time.monotonic() < deadline and other.code is None:
            time.sleep(POLL_S / 4)
        return other is self.learner and other.code is not None

    def _wait_or_stop(self, service: Service) -> None:
        deadline = time.monotonic() + self._stop_s
        while service.code is None and time.monotonic() < deadline and not self._interrupts:
            time.sleep(POLL_S / 4)
        self._stop(service)

    def _stop(self, *services: Service) -> None:
        """SIGTERM, a deadline, then SIGKILL; a further interrupt does not wait for the deadline."""
        running = [service for service in services if service.process and service.code is None]
        for service in running:
            service.terminate()
        deadline, seen = time.monotonic() + self._stop_s, self._interrupts
        while any(service.code is None for service in running):
            if time.monotonic() > deadline or self._interrupts > seen:
                for service in running:
                    if service.code is None:
                        logger.warning("%s did not stop within %g s; it is killed", service.name, self._stop_s)
                        service.kill()
            time.sleep(POLL_S / 4)


def service(name: str, config: RunConfig, config_file: Path, *arguments: str) -> Service:
    """`python -m NAME --config FILE`, with its share of the cores."""
    threads = config.learner.cpu_threads if name == "learner" else config.rollout.cpu_threads
    return Service(
        name=name,
        command=[sys.executable, "-m", name, "--config", str(config_file), *arguments],
        log=config.run_path / "logs" / f"{name}.log",
        environment=service_environment(threads),
    )


def service_environment(threads: int) -> dict[str, str]:
    """Half of the cores unless told otherwise; idle threads sleep, because spinning ones stall the other side."""
    return {
        "OMP_NUM_THREADS": str(threads or max(1, available_cores() // 2)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _die_with_parent() -> None:
    """Linux sends SIGTERM to the child when the launcher dies, even by SIGKILL."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
