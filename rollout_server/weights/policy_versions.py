"""Policy versions of the engine: it follows the newest that the learner has announced."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from asyncrl.config.schema import RunConfig
from asyncrl.errors import WaitTimeoutError
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import WeightManifest, Welcome
from rollout_server.link import LearnerLink
from rollout_server.prometheus import ServerExporter
from rollout_server.weights.receiver import WeightReceiver

logger = logging.getLogger(__name__)


class PolicyVersions:
    """Belongs to the event loop. `on_device` gives a block in which the device is this server's."""

    def __init__(
        self,
        config: RunConfig,
        receiver: WeightReceiver,
        link: LearnerLink,
        exporter: ServerExporter,
        incarnation: str,
        on_device: Callable[[], AbstractAsyncContextManager[None]],
    ):
        """`incarnation` is that of the learner that welcomed this server."""
        self._config = config
        self._receiver = receiver
        self._link = link
        self._exporter = exporter
        self._incarnation = incarnation
        self._on_device = on_device
        self._version = -1
        """Newest version received from the learner; -1: the model folder's weights, which no version has."""
        self._newest: WeightManifest | None = None
        self._manifest_arrived = asyncio.Event()
        self._changed = asyncio.Condition()

    def announce(self, manifest: WeightManifest) -> None:
        self._newest = manifest
        self._manifest_arrived.set()

    def learner_came_back(self, welcome: Welcome) -> bool:
        """Forget versions of an earlier learner process; True if it is a new one.

        It makes the versions again: equal in number, and in bits only if its machine is exact.
        """
        if welcome.incarnation == self._incarnation:
            return False
        logger.info("the learner has come back at version %d", welcome.version)
        self._incarnation = welcome.incarnation
        self._newest = None
        self._version = min(self._version, welcome.version - 1)
        return True

    def forget(self) -> None:
        """Discard the loaded version after a sleep without weights: it must come again."""
        self._version = -1
        self._manifest_arrived.set()

    @asynccontextmanager
    async def at_least(self, version: int) -> AsyncIterator[None]:
        """Run the block with weights of at least `version`, holding the device."""
        while True:
            await self._arrival_of(version)
            async with self._on_device():
                if self._version >= version:  # the turn before may have ended, and its weights with it
                    yield
                    return

    async def _arrival_of(self, version: int) -> None:
        deadline_s = self._config.learner.wait_timeout_s
        try:
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(lambda: self._version >= version)
        except TimeoutError:
            raise WaitTimeoutError(
                f"weights of version {version} did not arrive within {deadline_s:g} s; "
                f"the newest that did is {self._version} (-1: none)"
            ) from None

    @property
    def is_behind(self) -> bool:
        """True when a newer version has been announced."""
        return self._newest is not None and self._newest.version > self._version

    async def follow(self) -> None:
        """Load the newest version, again and again, until cancelled. Versions in between are skipped."""
        while True:
            await self._manifest_arrived.wait()
            async with self._on_device():
                self._manifest_arrived.clear()
                manifest = self._newest
                if manifest is not None and manifest.version > self._version:
                    await self._load(manifest)

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
            self._version = loaded.version
            self._changed.notify_all()
        await self._link.send(loaded)
        self._exporter.loaded(loaded, manifest.total_bytes)
