"""Runs the learner and its rollout servers until the learner is done: what crashes is started again, within limits."""

from __future__ import annotations

import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncrl.errors import ExitCode
from asyncrl.launch.processes import ServiceProcess

logger = logging.getLogger(__name__)

STOP_S = 15.0
"""Time a service has to end after SIGTERM before it is killed; the learner has the configured grace."""
POLL_S = 0.2
LONGEST_DELAY_S = 60.0
LONGEST_ERROR = 300
"""Characters of a crash's reason in the line for the user; the log has all."""
_FATAL = {
    ExitCode.USER_ERROR: ExitCode.USER_ERROR,
    ExitCode.BAD_STATE: ExitCode.BAD_STATE,
    ExitCode.INTERRUPTED: ExitCode.INTERRUPTED,
    -signal.SIGTERM: ExitCode.INTERRUPTED,
    -signal.SIGINT: ExitCode.INTERRUPTED,
}
"""Endings that another attempt would only repeat, or that a user asked for, and the run's exit code."""


@dataclass(frozen=True)
class RestartPolicy:
    max_restarts: int = 5
    """Most restarts of one service."""
    first_delay_s: float = 1.0
    healthy_s: float = 600.0
    """Running time after which a service has all its restarts again."""

    def delay_s(self, attempt: int) -> float:
        """Seconds before restart `attempt` = 1, 2, ...: each time twice as long."""
        return min(self.first_delay_s * 2 ** min(attempt - 1, 30), LONGEST_DELAY_S)


DEFAULT_POLICY = RestartPolicy()


@dataclass(frozen=True)
class Outcome:
    code: int
    """Exit code of the whole run: 0, 1, 2, 3 or 130."""
    failed: ServiceProcess | None = None
    """The side that ended the run."""
    gave_up: bool = False
    """True after more crashes than the policy allows."""


class Supervisor:
    """Starts services and watches them; `notify` gets a line for the user about each crash and restart."""

    def __init__(
        self,
        learner: ServiceProcess,
        *servers: ServiceProcess,
        policy: RestartPolicy = DEFAULT_POLICY,
        stop_s: float = STOP_S,
        grace_s: float = STOP_S,
        notify: Callable[[str], None] = logger.warning,
    ):
        """`grace_s`: time of the learner to write a checkpoint and end; the servers are stopped after it."""
        self.learner = learner
        self.services = (learner, *servers)
        self.restarts: Counter[str] = Counter()
        """Restarts of each service, over the whole run."""
        self._policy = policy
        self._stop_s, self._grace_s = stop_s, grace_s
        self._notify = notify
        self._crashes: Counter[str] = Counter()  # since the service was healthy
        self._due: dict[str, float] = {}
        self._interrupts = 0
        self._left: set[str] = set()
        """Servers that a signal has ended, and that others go on without."""

    def run(self, on_tick: Callable[[], None] = lambda: None) -> Outcome:
        """Run until all services are gone. The first SIGINT or SIGTERM stops them cleanly, a second one kills them."""
        previous = {number: signal.signal(number, self._interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for service in self.services:
                service.start()
            return self._watch(on_tick)
        finally:
            # Nothing is left to stop unless we ourselves failed: then, too, all may end in order.
            self._stop_all()
            for service in self.services:
                service.kill()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _interrupted(self, *_: object) -> None:
        self._interrupts += 1

    def _watch(self, on_tick: Callable[[], None]) -> Outcome:
        while True:
            on_tick()
            if self._interrupts:
                if self.learner.process and self.learner.code is None:
                    self._notify(f"stopping: the learner saves what has no checkpoint, within {self._grace_s:g} s")
                self._stop_all()
                return Outcome(ExitCode.INTERRUPTED)
            if self.learner.code == ExitCode.FINISHED:
                self._wait_or_stop(*self.services[1:])
                on_tick()
                return Outcome(ExitCode.FINISHED)
            for service in self.services:
                service.rotate_log()
                outcome = self._look_after(service)
                if outcome is not None:
                    self._stop_all()
                    was_ending = self.learner.code == ExitCode.FINISHED  # and had no more than its exit handlers to do
                    return Outcome(ExitCode.FINISHED) if was_ending else outcome
            time.sleep(POLL_S)

    def _look_after(self, service: ServiceProcess) -> Outcome | None:
        """Restart a service when due; return an outcome if the run must end."""
        code = service.code
        if code is None:
            return None
        if service.name in self._due:
            if time.monotonic() >= self._due[service.name]:
                del self._due[service.name]
                self.restarts[service.name] += 1
                service.start()
            return None
        if code in (ExitCode.FINISHED, ExitCode.LEARNER_LEFT):
            # A server in order: it was told goodbye. By a learner that comes back, it is needed again.
            if self._learner_comes_back():
                self._due[service.name] = self._due.get(self.learner.name, 0.0)
            return None
        if _FATAL.get(code) == ExitCode.INTERRUPTED and self._can_do_without(service):
            return None
        if code in _FATAL:
            return self._end_of_run(service)
        return self._after_crash(service)

    def _can_do_without(self, service: ServiceProcess) -> bool:
        """True for a server that got a signal where another one is left: somebody wanted this one to end."""
        if service is self.learner or self._left.issuperset(s.name for s in self.services[1:] if s is not service):
            return False
        if service.name not in self._left:
            self._left.add(service.name)
            self._notify(f"{service.name} got SIGTERM or SIGINT and is not started again; the other servers go on")
        return True

    def _learner_comes_back(self) -> bool:
        """True while the learner waits for, or has just had, a restart: its servers may take a while to end."""
        recently = self.restarts[self.learner.name] > 0 and self.learner.age_s < self._stop_s
        return recently or self.learner.name in self._due

    def _end_of_run(self, service: ServiceProcess) -> Outcome | None:
        """Choose the service whose failure ended the run: the learner, unless it crashed; None if it has finished."""
        if service is not self.learner:
            deadline = time.monotonic() + 2 * POLL_S
            while time.monotonic() < deadline and self.learner.code is None:
                time.sleep(POLL_S / 4)
            if self.learner.code == ExitCode.FINISHED:
                return None
            service = self.learner if self.learner.code in _FATAL else service
        assert service.code is not None
        return Outcome(_FATAL[service.code], failed=service)

    def _after_crash(self, service: ServiceProcess) -> Outcome | None:
        if service.age_s >= self._policy.healthy_s:
            self._crashes[service.name] = 0
        self._crashes[service.name] += 1
        attempt = self._crashes[service.name]
        service.kill()  # what it started and left behind may hold ports, files and memory
        if attempt > self._policy.max_restarts:
            return Outcome(ExitCode.CRASHED, failed=service, gave_up=True)
        delay = self._policy.delay_s(attempt)
        self._due[service.name] = time.monotonic() + delay
        error = service.last_error()[:LONGEST_ERROR]
        why = f" ({error})" if error else ""
        self._notify(f"{service.ending()}{why}; restart {attempt} of {self._policy.max_restarts} in {delay:g} s")
        return None

    def _wait_or_stop(self, *services: ServiceProcess) -> None:
        deadline = time.monotonic() + self._stop_s
        while any(s.code is None for s in services) and time.monotonic() < deadline and not self._interrupts:
            time.sleep(POLL_S / 4)
        self._stop(services, self._stop_s, self._interrupts)

    def _stop_all(self) -> None:
        """Stop the learner, which needs its servers until its checkpoint is written, and then these."""
        seen = self._interrupts
        self._stop((self.learner,), self._grace_s, seen)
        self._stop(self.services[1:], self._stop_s, seen)

    def _stop(self, services: Sequence[ServiceProcess], within_s: float, seen: int) -> None:
        """Send SIGTERM, and after a deadline SIGKILL; an interrupt beyond those `seen` does not wait for it."""
        running = [service for service in services if service.process and service.code is None]
        for service in running:
            service.terminate()
        deadline = time.monotonic() + within_s
        while any(service.code is None for service in running):
            if time.monotonic() > deadline or self._interrupts > seen:
                for service in running:
                    if service.code is None:
                        logger.warning(
                            "%s is killed: it had %g s to end, or a second signal came", *(service.name, within_s)
                        )
                        service.kill()
            time.sleep(POLL_S / 4)
