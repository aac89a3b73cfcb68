"""The learner's turns on a device that it shares with the rollout server (trainer.mode=sync).

It has the device from the start of the process on; `lend` puts the engine to sleep and lets the server have a turn,
`take_back` ends that turn and wakes the engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError, WaitTimeoutError
from asyncrl.telemetry.timeline import LEARNER
from learner.network.thread import NetworkThread
from learner.training.engines.base import TrainEngine
from protocol.faults import crash_point
from protocol.lease import POLL_S, DeviceLease, LeaseError, LeaseTimeout, describe

logger = logging.getLogger(__name__)

HOLDER = "learner"
TELL_EVERY_S = 1.0


def first_turn(config: RunConfig) -> DeviceLease:
    """The lease, before anything is on the device.

    After a crash the server may still have it: it returns it when it has not heard of us for network.timeout_s and
    has finished what it generates. Raises BadStateError naming the holder.
    """
    lease = DeviceLease(config.run_path, HOLDER)
    wait_s = config.network.timeout_s + config.learner.wait_timeout_s
    _take(lease, wait_s, "network.timeout_s + learner.wait_timeout_s", lambda: logger.info("waiting: %s", _who(lease)))
    return lease


class OwnDevice:
    """Of a learner that shares none: it is always ours, and nothing has to be done for that."""

    is_shared = False
    is_lent = False
    who = "the learner"

    def lend(self) -> None: ...

    def take_back(self, waiting: Callable[[], None]) -> None: ...

    def report(self) -> dict[str, float]:
        return {}


class DeviceTurns:
    """`engine` is awake exactly while `lease` is ours."""

    is_shared = True

    def __init__(self, config: RunConfig, lease: DeviceLease, engine: TrainEngine, exchange: NetworkThread):
        self._config = config
        self._lease = lease
        self._engine = engine
        self._exchange = exchange
        self._lent_at = 0.0
        self._seconds = {"sleep_s/learner": 0.0, "wake_s/learner": 0.0, "asleep_s/learner": 0.0}
        """Since the last report."""
        self._moved_bytes = 0

    @property
    def is_lent(self) -> bool:
        return self._lease.fence is None

    @property
    def who(self) -> str:
        """Has the device, for the status."""
        return _who(self._lease)

    def lend(self) -> None:
        """Sleep, and let the server have the device. Nothing happens if it has."""
        if self._lease.fence is None:
            return
        started = time.monotonic()
        self._moved_bytes = self._engine.sleep()
        crash_point("learner.asleep")
        fence = self._lease.fence
        self._lease.give_up()
        self._lent_at = time.monotonic()
        self._seconds["sleep_s/learner"] += self._lent_at - started
        self._exchange.lend(fence + 1)

    def take_back(self, waiting: Callable[[], None]) -> None:
        """Have the server sleep, and wake up. Nothing happens if the device is ours.

        Calls `waiting` about once a second. Raises BadStateError naming the holder if it is not returned.
        """
        if self._lease.fence is not None:
            return
        self._exchange.recall()

        def look() -> None:
            self._exchange.check()
            waiting()

        _take(self._lease, self._config.learner.wait_timeout_s, "learner.wait_timeout_s", look)
        crash_point("learner.waking")
        taken = time.monotonic()
        self._exchange.timeline.ended(LEARNER, "asleep", taken - self._lent_at)
        self._engine.wake()
        self._seconds["wake_s/learner"] += time.monotonic() - taken
        self._seconds["asleep_s/learner"] += taken - self._lent_at

    def report(self) -> dict[str, float]:
        """For the record of a step: what the turns since the last report have cost, and the fence of ours."""
        values: dict[str, float] = {**self._seconds, "sleep_bytes/learner": self._moved_bytes}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        returned = self._exchange.lease_returned
        if returned is not None:
            values |= {
                "sleep_s/rollout": returned.sleep_s,
                "wake_s/rollout": returned.wake_s,
                "sleep_bytes/rollout": returned.sleep_bytes,
            }
        return values | {"lease_fence": self._lease.fence or 0}


def _take(lease: DeviceLease, wait_s: float, setting: str, waiting: Callable[[], None]) -> None:
    """Raises BadStateError."""
    started = told = time.monotonic()
    try:
        while not lease.try_take():
            now = time.monotonic()
            if now - started > wait_s:
                raise lease.timeout(wait_s, setting)
            if now - told > TELL_EVERY_S:
                told = now
                waiting()
            time.sleep(POLL_S)
    except LeaseError as error:
        kind = WaitTimeoutError if isinstance(error, LeaseTimeout) else BadStateError
        raise kind(str(error)) from error


def _who(lease: DeviceLease) -> str:
    return describe(lease.folder)
