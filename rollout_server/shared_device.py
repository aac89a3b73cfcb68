"""The server's side of the device lease (trainer.mode=sync): a device that it shares with the learner.

A lease: granted by the learner, taken, engine awake (the first time: the model loaded); work; recalled, nothing
generated any more, engine asleep, returned. All work on the device happens inside `in_use`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from asyncrl.errors import BadStateError, WaitTimeoutError
from protocol.device_lock import POLL_S, DeviceLease, LeaseError, StaleFence
from protocol.errors import ErrorCode
from protocol.faults import crash_point
from protocol.messages import Error, LeaseReturn
from rollout_server.engines.base import InferenceEngine
from rollout_server.exporter import ServerExporter
from rollout_server.link import LearnerLink

logger = logging.getLogger(__name__)

HOLDER = "rollout_server"


class SharedDevice:
    """The device lease on the event loop; fences only increase: the largest grant and the largest recall count."""

    def __init__(
        self,
        run_path: Path,
        engine: InferenceEngine,
        link: LearnerLink,
        exporter: ServerExporter,
        *,
        wait_timeout_s: float,
        heartbeat_s: float,
    ):
        self.is_loaded = False
        """True once the engine has been started."""
        self.on_asleep = lambda: None
        """Callback after the engine has fallen asleep."""
        self._wait_timeout_s, self._heartbeat_s = wait_timeout_s, heartbeat_s
        self._engine = engine
        self._link = link
        self._exporter = exporter
        self._lease = DeviceLease(run_path, HOLDER)
        self._granted = 0
        self._over = 0
        """Grants up to this fence are void: recalled, used, or of a learner that has gone."""
        self._changed = asyncio.Event()
        self._awake = asyncio.Event()
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._slept_at = time.monotonic()

    # --- grants and recalls ------------------------------------------------------------------

    @property
    def is_awake(self) -> bool:
        return self._awake.is_set()

    def grant(self, fence: int) -> Error | None:
        """Handle a grant; return an Error if its fence is stale."""
        if fence <= max(self._over, self._lease.fence or 0):
            newest = max(self._over, self._lease.fence or 0)
            return self._stale(f"fence {fence} was granted, but the newest that this server knows is {newest}")
        self._granted = max(self._granted, fence)
        self._changed.set()
        return None

    def recall(self, fence: int) -> Error | None:
        """Handle a recall; return an Error if its fence is stale."""
        if self._lease.fence is not None and fence < self._lease.fence:
            return self._stale(f"fence {fence} was recalled, but fence {self._lease.fence} holds the device")
        self._over = max(self._over, fence)
        self._changed.set()
        return None

    def learner_came_back(self) -> None:
        """Reset fences for a new learner process: it counts on from the lease, and knows of no earlier grant."""
        self._granted = self._over = self._lease.fence or 0

    def _stale(self, reason: str) -> Error:
        self._exporter.stale_fence()
        return Error(code=ErrorCode.STALE_FENCE, reason=reason)

    # --- leases ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """Wait for the lease; until the end of the block the device is not returned."""
        while not self._awake.is_set():  # a lease may be over again before this task goes on
            await self._awake.wait()
        self._lease.check()
        self._users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def follow_grants(self) -> None:
        """Take the lease at each grant, and return it at its recall, until cancelled."""
        while True:
            fence = await self._next_grant()
            try:
                await self._take(fence)
            except StaleFence as problem:
                logger.warning("%s", problem)
                await self._link.send(self._stale(str(problem)))
                self._over = max(self._over, fence)
                continue
            wake_s = await self._wake()
            await self._recall_of(fence)
            self._awake.clear()
            await self._unused.wait()
            sleep_s = await self._sleep()
            self._over = max(self._over, fence)
            self._lease.give_up()
            moved = self._engine.usage.sleep_bytes
            await self._link.send(LeaseReturn(fence=fence, wake_s=wake_s, sleep_s=sleep_s, sleep_bytes=moved))

    async def _next_grant(self) -> int:
        while self._granted <= self._over:
            self._changed.clear()
            await self._changed.wait()
        return self._granted

    async def _take(self, fence: int) -> None:
        """Take the lease, which is free unless a process that had it is ending. Raises BadStateError naming that."""
        wait_s = self._wait_timeout_s
        deadline = time.monotonic() + wait_s
        try:
            while not self._lease.try_take(fence):
                if time.monotonic() > deadline:
                    raise WaitTimeoutError(self._lease.waited(wait_s, "learner.wait_timeout_s"))
                await asyncio.sleep(POLL_S)
        except LeaseError as error:
            raise BadStateError(str(error)) from error
        self._exporter.took_device(fence)

    async def _wake(self) -> float:
        started = time.monotonic()
        crash_point("server.waking")
        if self.is_loaded:
            await self._engine.wake()
        else:
            await self._engine.start()
            gc.freeze()  # what imports and the model have left is there to stay: falling asleep need not look at it
            self.is_loaded = True
        self._awake.set()
        took = time.monotonic() - started
        self._exporter.woke(took, started - self._slept_at)
        return took

    async def _recall_of(self, fence: int) -> None:
        """Wait for a recall, or for a learner silent too long: its successor may want the device."""
        while self._over < fence:
            if self._link.learner_is_silent:
                logger.warning("the learner is silent: returning the device when what is generated is done")
                self._over = max(self._over, self._granted)
                return
            self._changed.clear()
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _sleep(self) -> float:
        started = time.monotonic()
        await self._engine.sleep()
        self.on_asleep()
        crash_point("server.asleep")
        self._slept_at = time.monotonic()
        took = self._slept_at - started
        self._exporter.fell_asleep(took, self._engine.usage.sleep_bytes)
        return took
