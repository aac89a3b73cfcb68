"""The life of a rollout server: load, say hello, work tickets until the learner says goodbye."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

import psutil

from asyncrl.config.channel_rules import network_is_open
from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError
from asyncrl.models.base_weights import base_fingerprint
from asyncrl.models.loading import folder_fingerprint
from asyncrl.models.processing import PromptProcessor
from asyncrl.rewards.pool import RewardPool
from asyncrl.telemetry.metrics import MetricSet
from asyncrl.weight_transfer.requirements import check_cuda
from protocol.errors import ErrorCode, ProtocolError
from protocol.faults import crash_point
from protocol.messages import (
    Channel,
    Error,
    Goodbye,
    LeaseGrant,
    LeaseRecall,
    ServerHeartbeat,
    Ticket,
    TicketFailed,
    Tickets,
    TrajectoryRecord,
    WeightManifest,
    Welcome,
)
from rollout_server.channels import choose_channel
from rollout_server.device import SharedDevice
from rollout_server.engines import create_engine
from rollout_server.engines.base import Completion, EngineUsage
from rollout_server.link import LearnerLink
from rollout_server.metrics import METRICS
from rollout_server.production import GroupProducer
from rollout_server.sampling_contract import check_sampling
from rollout_server.weights import WeightReceiver

logger = logging.getLogger(__name__)


class RolloutServer:
    def __init__(self, config: RunConfig):
        self.config = config
        self.metrics = MetricSet(METRICS, "rollout")
        self.metrics.include("vllm:")
        self._started = time.monotonic()
        self._held: dict[int, Ticket] = {}
        self._newest: WeightManifest | None = None
        self._loaded_version = -1
        """Newest version received from the learner; what the model folder holds is nobody's policy."""
        self._incarnation = ""
        """Of the learner that the loaded version came from."""
        self._manifest_arrived = asyncio.Event()
        self._version_changed = asyncio.Condition()
        self.device: SharedDevice | None = None
        """Where it is shared with the learner; None: it is ours alone."""

    async def run(self) -> None:
        """Returns when the learner says goodbye or this task is cancelled. Raises what stopped it otherwise."""
        check_cuda(self.config, "rollout.device", self.config.rollout.device)
        self.metrics.serve(self.config.telemetry.host, self.config.telemetry.rollout_port)
        self.processor = PromptProcessor(self.config.model)
        self.engine = create_engine(self.config, self.processor)
        self.rewards = RewardPool(self.config.reward)
        try:
            await self.rewards.start()
            await self._serve(await self._fingerprint())
        finally:
            await self.rewards.close()
            await self.engine.close()
            self.metrics.close()

    async def _fingerprint(self) -> str:
        """Of the model; where the device is shared, nothing is loaded before our first turn."""
        if self.config.trainer.mode == "sync":
            return await asyncio.to_thread(folder_fingerprint, self.config.model)
        await self.engine.start()
        return self.engine.architecture_fingerprint

    async def _serve(self, fingerprint: str) -> None:
        self.link = LearnerLink(
            self.config,
            engine=self.engine.name,
            fingerprints=(fingerprint, self.processor.fingerprint),
            in_work=lambda: self._held,
            base_fingerprint=base_fingerprint(self.config.model) if self.config.model.lora.rank else "",
        )
        if self.config.trainer.mode == "sync":
            self.device = SharedDevice(self.config, self.engine, self.link, self.metrics)
            if self.config.rollout.sleep_level == 2:
                self.device.on_asleep = self._forget_weights
        reason, expected = "stopped", True
        try:
            welcome = await self.link.connect()
            channel = await self._channel(welcome)
            logger.info("welcomed to run %s at version %d; weights over %s", welcome.run_id, welcome.version, channel)
            self._incarnation = welcome.incarnation
            endpoint = f"tcp://{self.config.network.host}:{welcome.weights_port}"
            self.receiver = WeightReceiver(self.config, self.engine, channel, endpoint)
            self.producer = GroupProducer(self.engine, self.rewards, self.processor, self.link.server_id)
            self.producer.on_trajectory = self._observe_trajectory
            async with asyncio.TaskGroup() as self._tasks:
                background = [
                    self._tasks.create_task(self._heartbeats()),
                    self._tasks.create_task(self._follow_weights()),
                ]
                if self.device:
                    background.append(self._tasks.create_task(self.device.take_turns()))
                await self._receive()
                for task in [*background, *self._work]:
                    task.cancel()
        except ExceptionGroup as failures:
            reason, expected = str(failures.exceptions[0]), False
            raise failures.exceptions[0] from failures
        except Exception as error:
            reason, expected = str(error), False
            raise
        finally:
            await self.link.goodbye(reason, expected=expected, unfinished=tuple(self._held))
            self.link.close()
            if hasattr(self, "receiver"):
                self.receiver.close()

    async def _channel(self, welcome: Welcome) -> Channel:
        staging = self.engine.staging if welcome.device else None
        return choose_channel(
            self.config.rollout.weights_channel,
            same_host=welcome.host_id == self.link.host_id,
            source=welcome.device,
            devices=await staging.devices() if staging else (),
            open_network=network_is_open(self.config),
        )

    async def _receive(self) -> None:
        self._work: set[asyncio.Task[None]] = set()
        while True:
            message = await self.link.next_message()
            if isinstance(message, Tickets):
                self._begin(message)
            elif isinstance(message, WeightManifest):
                self._newest = message
                self._manifest_arrived.set()
            elif isinstance(message, Welcome):
                self._welcome_again(message)
            elif isinstance(message, LeaseGrant | LeaseRecall):
                await self._obey_lease(message)
            elif isinstance(message, Goodbye):
                logger.info("the learner says goodbye: %s", message.reason)
                return

    async def _obey_lease(self, message: LeaseGrant | LeaseRecall) -> None:
        if self.device is None:
            refusal: Error | None = Error(code=ErrorCode.STALE_FENCE, reason="this server shares no device")
        elif isinstance(message, LeaseGrant):
            refusal = self.device.grant(message.fence)
        else:
            refusal = self.device.recall(message.fence)
        if refusal is not None:
            logger.warning("refused: %s", refusal.reason)
            await self.link.send(refusal)

    def _welcome_again(self, welcome: Welcome) -> None:
        """Another incarnation made its versions again: equal in number, and in bits only if its machine is exact."""
        if welcome.incarnation != self._incarnation:
            logger.info("the learner has come back at version %d", welcome.version)
            self._incarnation = welcome.incarnation
            self._newest = None
            self._loaded_version = min(self._loaded_version, welcome.version - 1)
            if self.device:
                self.device.learner_came_back()

    def _begin(self, message: Tickets) -> None:
        """Start what is new; after a reconnection the learner may send tickets that are in work or sent already."""
        new = tuple(
            ticket
            for ticket in message.tickets
            if ticket.ticket_id not in self._held and ticket.ticket_id not in self.link.unacknowledged
        )
        if not new:
            return
        self._held |= {ticket.ticket_id: ticket for ticket in new}
        task = self._tasks.create_task(self._work_tickets(message.model_copy(update={"tickets": new})))
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _work_tickets(self, message: Tickets) -> None:
        """Produce the groups of one message; a failure returns its unfinished tickets to the learner."""
        waiting = {ticket.ticket_id for ticket in message.tickets}
        try:
            check_sampling(message.tickets, self.config.rollout)
            async with self._weights_at_least(max(ticket.min_version for ticket in message.tickets)):
                crash_point("ticket.started")
                async for group in self.producer.produce(message.tickets, message.blobs):
                    await self.link.send_group(group)
                    self.metrics["groups_total"].inc()
                    self.metrics["generate_seconds"].observe(group.timings.generate_s)
                    waiting.discard(group.ticket_id)
                    self._held.pop(group.ticket_id, None)
        except Exception as error:
            logger.exception("tickets %s failed", sorted(waiting))
            for ticket_id in waiting:
                self._held.pop(ticket_id, None)
                kind, text = type(error).__name__, str(error)[:1000]
                await self.link.send(TicketFailed(ticket_id=ticket_id, error_kind=kind, error_message=text))

    @asynccontextmanager
    async def _weights_at_least(self, version: int) -> AsyncIterator[None]:
        """The block runs with weights of this version or newer, on a device that is ours."""
        while True:
            await self._version_at_least(version)
            async with self._on_device():
                if self._loaded_version >= version:  # the turn before may have ended, and its weights with it
                    yield
                    return

    def _on_device(self) -> AbstractAsyncContextManager[None]:
        return self.device.in_use() if self.device else nullcontext()

    async def _version_at_least(self, version: int) -> None:
        deadline_s = self.config.learner.wait_timeout_s
        try:
            async with asyncio.timeout(deadline_s), self._version_changed:
                await self._version_changed.wait_for(lambda: self._loaded_version >= version)
        except TimeoutError:
            raise BadStateError(
                f"weights of version {version} did not arrive within {deadline_s:g} s; "
                f"the newest that did is {self._loaded_version} (-1: none)"
            ) from None

    async def _follow_weights(self) -> None:
        """Always towards the newest version; versions in between are skipped."""
        while True:
            await self._manifest_arrived.wait()
            async with self._on_device():
                self._manifest_arrived.clear()
                manifest = self._newest
                if manifest is not None and manifest.version > self._loaded_version:
                    await self._load(manifest)

    async def _load(self, manifest: WeightManifest) -> None:
        incarnation = self._incarnation
        try:
            loaded = await self.receiver.load(manifest)
        except ProtocolError as error:
            if error.code is not ErrorCode.VERSION_GONE:
                raise
            logger.info("version %d is gone already; waiting for a newer one", manifest.version)
            return
        except TimeoutError as problem:
            # No other manifest need come: the learner may wait for groups of this version.
            logger.warning("%s; trying again", problem)
            self._manifest_arrived.set()
            return
        if incarnation != self._incarnation:
            self._manifest_arrived.set()  # the learner has come back meanwhile: its own version is the one
            return
        async with self._version_changed:
            self._loaded_version = loaded.version
            self._version_changed.notify_all()
        await self.link.send(loaded)
        self.metrics["policy_version"].set(loaded.version)
        self.metrics["weight_load_seconds"].observe(loaded.transfer_s + loaded.load_s)

    async def _heartbeats(self) -> None:
        process = psutil.Process()
        while True:
            usage = self.engine.usage if self._is_started else EngineUsage(0, 0.0, 0, 0)
            running = min(len(self._held), -(-usage.sequences_running // self.config.batch.group_size))
            beat = ServerHeartbeat(
                version=self.engine.version if self._is_started else 0,
                groups_queued=len(self._held) - running,
                groups_running=running,
                groups_unacknowledged=len(self.link.unacknowledged),
                tokens_generated=usage.tokens_generated,
                busy_s=usage.busy_s,
                uptime_s=time.monotonic() - self._started,
            )
            await self.link.send(beat)
            await self.link.resend_overdue()
            self._export(beat, process.memory_info().rss)
            self.metrics["update_pause_seconds"].set(usage.update_pause_s)
            await asyncio.sleep(self.config.network.heartbeat_s)

    @property
    def _is_started(self) -> bool:
        """False before our first turn on a shared device."""
        return self.device is None or self.device.is_loaded

    def _forget_weights(self) -> None:
        """The engine sleeps without keeping them: the same version must come again."""
        self._loaded_version = -1
        self._manifest_arrived.set()

    def _export(self, beat: ServerHeartbeat, rss_bytes: int) -> None:
        self.metrics["held_groups"].labels(state="queued").set(beat.groups_queued)
        self.metrics["held_groups"].labels(state="running").set(beat.groups_running)
        self.metrics["held_groups"].labels(state="unacknowledged").set(beat.groups_unacknowledged)
        self.metrics["tokens_generated"].set(beat.tokens_generated)
        self.metrics["busy_seconds"].set(beat.busy_s)
        self.metrics["idle_ratio"].set(1 - beat.busy_s / max(beat.uptime_s, 1e-9))
        self.metrics["rss_bytes"].set(rss_bytes)

    def _observe_trajectory(self, completion: Completion, record: TrajectoryRecord) -> None:
        self.metrics["trajectories_total"].labels(status=str(record.status)).inc()
        self.metrics["completion_tokens"].observe(len(completion.token_ids))
        if record.error_kind:
            self.metrics["reward_errors_total"].labels(kind=record.error_kind).inc()
