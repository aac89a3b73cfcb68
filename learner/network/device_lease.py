"""The learner's side of the device lease (trainer.mode=sync): learner and rollout server use one device alternately.

The main thread has the device from the start of the process on (`LearnerLease`): `lend` puts the engine to sleep and
grants the device to the server, `take_back` recalls it and wakes the engine. The network thread sends the server grants
and recalls (`LeaseGrants`). Messages only ask for it: `protocol/device_lock.py` excludes the other side.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.errors import BadStateError, WaitTimeoutError
from asyncrl.telemetry.timeline import LEARNER, Timeline
from learner.network.servers import Servers, ServerState
from learner.training.engine import TorchEngine
from protocol.device_lock import POLL_S, DeviceLease, LeaseError, describe
from protocol.errors import ErrorCode
from protocol.faults import crash_point
from protocol.messages import Error, LeaseGrant, LeaseRecall, LeaseReturn

logger = logging.getLogger(__name__)

HOLDER = "learner"
REPORT_EVERY_S = 1.0
DURATIONS = ("sleep_s/learner", "wake_s/learner", "asleep_s/learner")


class LeaseGrants:
    """Grants and recalls the device. Used by the network thread only, except `returned`."""

    def __init__(self, servers: Servers):
        self.returned: LeaseReturn | None = None
        """The server's newest report of its lease."""
        self._servers = servers
        self._lent = False
        self._next = 1
        """Fence of the next grant."""
        self._fence = 0
        """Fence of the newest grant."""
        self._tenant: ServerState | None = None
        """The server that was sent it; another object after a reconnection."""

    def lend(self, fence: int) -> None:
        """Mark the device as free; the next grant has this fence or a larger one."""
        self._lent, self._tenant, self._next = True, None, max(self._next, fence)

    def recall(self) -> None:
        """Ask the server to return the device."""
        self._lent = False
        server = self._connected()
        if server is not None and server is self._tenant:
            self._servers.send(server.hello.server_id, LeaseRecall(fence=self._fence))

    def offer(self) -> None:
        """Run one iteration: grant the device to a connected server that has no grant yet."""
        server = self._connected()
        if not self._lent or server is None or server is self._tenant:
            return
        self._tenant, self._fence = server, self._next
        self._next += 1
        self._servers.send(server.hello.server_id, LeaseGrant(fence=self._fence))

    def _connected(self) -> ServerState | None:
        """The connected server, or None; sync mode has only one."""
        return next(iter(self._servers.connected.values()), None)

    def is_at_work(self, server: ServerState) -> bool:
        """True if the server was granted the device and has loaded weights: its first lease starts the engine, too."""
        return server is self._tenant and server.loaded is not None

    def take_return(self, server: ServerState, message: LeaseReturn) -> None:
        """Handle LeaseReturn; if it came without a recall (the server had lost contact), `offer` grants again."""
        if server is not self._tenant or message.fence != self._fence:
            reason = f"fence {message.fence} was returned, the newest granted to this server is {self._fence}"
            self._servers.errors[str(ErrorCode.STALE_FENCE)] += 1
            self._servers.send(server.hello.server_id, Error(code=ErrorCode.STALE_FENCE, reason=reason))
            return
        self.returned, self._tenant = message, None


@dataclass
class LearnerLease:
    """The lease on the main thread: `engine` is awake exactly while the learner holds `lease`.

    Without a lease the device is not shared: it is always the learner's, and nothing has to be done.
    """

    wait_timeout_s: float
    """learner.wait_timeout_s."""
    lease: DeviceLease | None
    engine: TorchEngine
    grants: LeaseGrants
    call_soon: Callable[..., None]
    """Runs a method of `grants` on the network thread."""
    timeline: Timeline
    _lent_at: float = 0.0
    _moved_bytes: int = 0
    _seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(DURATIONS, 0.0))
    """Durations since the last report."""

    @property
    def is_shared(self) -> bool:
        return self.lease is not None

    @property
    def is_lent(self) -> bool:
        return self.lease is not None and self.lease.fence is None

    @property
    def holder(self) -> str:
        """The process that has the device, for the status."""
        return describe(self.lease.folder) if self.lease else HOLDER

    def lend(self) -> None:
        """Put the engine to sleep and release the device; no-op if released."""
        if self.lease is None or self.lease.fence is None:
            return
        started, fence = time.monotonic(), self.lease.fence
        self._moved_bytes = self.engine.sleep()
        crash_point("learner.asleep")
        self.lease.give_up()
        self._lent_at = time.monotonic()
        self._seconds["sleep_s/learner"] += self._lent_at - started
        self.call_soon(self.grants.lend, fence + 1)

    def take_back(self, waiting: Callable[[], None]) -> None:
        """Recall the device and wake the engine; no-op if the learner holds the device.

        Calls `waiting` about once a second. Raises BadStateError naming the holder if it is not returned.
        """
        if self.lease is None or self.lease.fence is not None:
            return
        self.call_soon(self.grants.recall)
        _take(self.lease, self.wait_timeout_s, "learner.wait_timeout_s", waiting)
        crash_point("learner.waking")
        taken = time.monotonic()
        self.timeline.ended(LEARNER, "asleep", taken - self._lent_at)
        self.engine.wake()
        self._seconds["wake_s/learner"] += time.monotonic() - taken
        self._seconds["asleep_s/learner"] += taken - self._lent_at

    def report(self) -> dict[str, float]:
        """Durations of the leases since the last report, and the learner's fence, for the record of a step."""
        if self.lease is None:
            return {}
        values: dict[str, float] = {**self._seconds, "sleep_bytes/learner": self._moved_bytes}
        self._seconds = dict.fromkeys(DURATIONS, 0.0)
        returned = self.grants.returned
        if returned is not None:
            values |= {
                "sleep_s/rollout": returned.sleep_s,
                "wake_s/rollout": returned.wake_s,
                "sleep_bytes/rollout": returned.sleep_bytes,
            }
        return values | {"lease_fence": self.lease.fence or 0}


def take_first_lease(run_path: Path, *, timeout_s: float, wait_timeout_s: float) -> DeviceLease:
    """Take the lease before anything is on the device.

    After a crash the server may still have it: it returns it when it has not heard of us for network.timeout_s and
    has finished what it generates. Raises BadStateError naming the holder.
    """
    lease = DeviceLease(run_path, HOLDER)
    wait_s = timeout_s + wait_timeout_s
    setting = "network.timeout_s + learner.wait_timeout_s"
    _take(lease, wait_s, setting, lambda: logger.info("waiting: %s", describe(lease.folder)))
    return lease


def _take(lease: DeviceLease, wait_s: float, setting: str, waiting: Callable[[], None]) -> None:
    """Wait for the lease. Raises BadStateError."""
    started = reported = time.monotonic()
    try:
        while not lease.try_take():
            now = time.monotonic()
            if now - started > wait_s:
                raise WaitTimeoutError(lease.waited(wait_s, setting))
            if now - reported > REPORT_EVERY_S:
                reported = now
                waiting()
            time.sleep(POLL_S)
    except LeaseError as error:
        raise BadStateError(str(error)) from error
