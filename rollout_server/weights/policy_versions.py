"""Policy versions of the engine: it follows the one that the learner has announced last.

That is a newer one, or for an evaluation one from before: then what is being sampled is finished first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from asyncrl.errors import WaitTimeoutError
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import WeightManifest, WeightsLoaded, Welcome
from rollout_server.link import LearnerLink
from rollout_server.weights.receiver import WeightReceiver

logger = logging.getLogger(__name__)


class PolicyVersions:
    """Belongs to the event loop. `on_device` gives a block in which the device is this server's."""

    def __init__(
        self,
        wait_timeout_s: float,
        receiver: WeightReceiver,
        link: LearnerLink,
        on_loaded: Callable[[WeightsLoaded, int], object],
        incarnation: str,
        on_device: Callable[[], AbstractAsyncContextManager[None]],
    ):
        """`on_loaded` is called with each version in the engine, and its bytes. `incarnation` is that of the learner
        that welcomed this server."""
        self._wait_timeout_s = wait_timeout_s
        self._receiver = receiver
        self._link = link
        self._on_loaded = on_loaded
        self._incarnation = incarnation
        self._on_device = on_device
        self._version = -1
        """Newest version received from the learner; -1: the model folder's weights, which no version has."""
        self._announced: WeightManifest | None = None
        self._loaded: tuple[str, int] | None = None
        """Incarnation of the learner whose version is in the engine, and the version; None: it has none."""
        self._num_at_work = 0
        self._goes_back = False
        """True while an older version is about to be loaded: nothing begins."""
        self._manifest_arrived = asyncio.Event()
        self._changed = asyncio.Condition()

    def announce(self, manifest: WeightManifest) -> None:
        self._announced = manifest
        self._manifest_arrived.set()

    def learner_came_back(self, welcome: Welcome) -> bool:
        """Forget versions of an earlier learner process; True if it is a new one.

        It makes the versions again: equal in number, and in bits only if its machine is exact.
        """
        if welcome.incarnation == self._incarnation:
            return False
        logger.info("the learner has come back at version %d", welcome.version)
        self._incarnation = welcome.incarnation
        self._announced = None
        self._version = min(self._version, welcome.version - 1)
        return True

    def forget(self) -> None:
        """Discard the loaded version after a sleep without weights: it must come again."""
        self._version, self._loaded = -1, None
        self._manifest_arrived.set()

    @asynccontextmanager
    async def at_least(self, version: int) -> AsyncIterator[None]:
        """Run the block with weights of at least `version`, holding the device."""
        while True:
            await self._arrival_of(version)
            async with self._on_device():
                if self._may_begin(version):  # the turn before may have ended, and its weights with it
                    self._num_at_work += 1
                    try:
                        yield
                    finally:
                        self._num_at_work -= 1
                        async with self._changed:
                            self._changed.notify_all()
                    return

    def _may_begin(self, version: int) -> bool:
        return self._version >= version and not self._goes_back

    async def _arrival_of(self, version: int) -> None:
        deadline_s = self._wait_timeout_s
        try:
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(lambda: self._may_begin(version))
        except TimeoutError:
            raise WaitTimeoutError(
                f"weights of version {version} did not arrive within {deadline_s:g} s; "
                f"the newest that did is {self._version} (-1: none)"
            ) from None

    @property
    def is_behind(self) -> bool:
        """True when another version than the engine's has been announced."""
        return self._announced is not None and not self._has(self._announced)

    def _has(self, manifest: WeightManifest) -> bool:
        """Whether the engine has the version, of this learner process: another one's may have other bits."""
        return self._loaded == (self._incarnation, manifest.version)

    async def follow(self) -> None:
        """Load the version that was announced last, again and again, until cancelled; those before it are skipped."""
        while True:
            await self._manifest_arrived.wait()
            async with self._on_device():
                self._manifest_arrived.clear()
                manifest = self._announced
                if manifest is None or self._has(manifest):
                    continue
                if self._loaded is None or manifest.version >= self._loaded[1]:
                    await self._load(manifest)
                else:
                    await self._go_back(manifest)

    async def _go_back(self, manifest: WeightManifest) -> None:
        """Load an older version when what is being sampled is finished: no completion may change to it."""
        self._goes_back = True
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._num_at_work)
            await self._load(manifest)
        finally:
            self._goes_back = False
            async with self._changed:
                self._changed.notify_all()

    async def _load(self, manifest: WeightManifest) -> None:
        incarnation = self._incarnation
        try:
            loaded = await self._receiver.load(manifest)
        except ProtocolError as error:
            if error.code is not ErrorCode.VERSION_GONE:
                raise
            # A newer one has been announced, or will be, by a learner that has come back: after its welcome.
            logger.info("version %d is gone; waiting for the next: %s", manifest.version, error.reason)
            return
        except TimeoutError as problem:
            # No other one need be announced: the learner may wait for groups of this version.
            logger.warning("%s; trying again", problem)
            self._manifest_arrived.set()
            return
        if incarnation != self._incarnation:
            return  # the learner has come back meanwhile, and its own version is the one
        async with self._changed:
            self._version, self._loaded = loaded.version, (incarnation, loaded.version)
            self._changed.notify_all()
        await self._link.send(loaded)
        self._on_loaded(loaded, manifest.total_bytes)
