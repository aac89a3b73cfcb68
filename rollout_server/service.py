"""The life of a rollout server: load, say hello, obey the learner until it says goodbye."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial

from asyncrl.config.parts import ROLLOUT_ENGINES, device_channels
from asyncrl.config.schema import RunConfig
from asyncrl.devices.device import check_device_channel, resolve_device
from asyncrl.errors import BadStateError, LearnerLeftError
from asyncrl.journal.run_inputs import scoring_fingerprints, scoring_settings
from asyncrl.model_files.folder import base_fingerprint
from asyncrl.models.lora import folder_fingerprint
from asyncrl.processing.processor import PromptProcessor
from asyncrl.rewards.scorer import RewardScorer
from protocol.errors import ErrorCode
from protocol.messages import (
    Channel,
    Error,
    Goodbye,
    LeaseGrant,
    LeaseRecall,
    ServerHeartbeat,
    Tickets,
    WeightManifest,
    Welcome,
)
from rollout_server.engines import create_engine
from rollout_server.engines.base import EngineDied, EngineUsage
from rollout_server.exporter import create_exporter
from rollout_server.link import LearnerLink
from rollout_server.production.environments import environment_workers, environments_of
from rollout_server.production.group_producer import GroupProducer
from rollout_server.shared_device import SharedDevice
from rollout_server.tickets_in_work import TicketsInWork
from rollout_server.weights.channels import choose_channel, open_puller, open_receiver
from rollout_server.weights.policy_versions import PolicyVersions
from rollout_server.weights.receiver import WeightReceiver

logger = logging.getLogger(__name__)


class RolloutServer:
    def __init__(self, config: RunConfig, is_over: Callable[[], bool] = lambda: False):
        """`is_over` tells whether the run is known to be finished. It is asked while no learner answers."""
        self.config = config
        self._is_over = is_over
        self.exporter = create_exporter(
            config.telemetry,
            lambda: resolve_device(config.rollout.device),
            run=str(config.run_path),
            engine_prefix=ROLLOUT_ENGINES[config.rollout.engine].metric_prefix,
        )
        self._started = time.monotonic()
        self.device: SharedDevice | None = None
        """Lease of a device that is shared with the learner; None: this server has a device of its own."""

    async def run(self) -> None:
        """Serve until the run is finished; raises LearnerLeftError or the failure."""
        check_device_channel(self.config.rollout, "rollout.device", self.config.rollout.device)
        self.exporter.serve()
        self.processor = PromptProcessor(self.config.model, self.config.data.chat_template_kwargs)
        self.engine = create_engine(self.config, self.processor)
        self._scoring = scoring_fingerprints(scoring_settings(self.config.reward, self.config.environment))
        self.rewards = RewardScorer(self.config.reward)  # whose workers hold the files as they are now
        self.environments = environment_workers(self.config.environment, self.processor)
        try:
            await self.rewards.start()
            if self.environments:
                await self.environments.start()
                self.processor.show_tools(self.environments.tools)
            await self._serve(await self._fingerprint())
        finally:
            await self.rewards.close()
            if self.environments:
                await self.environments.close()
            await self.engine.close()
            self.exporter.close()

    async def drain(self) -> None:
        """Give back all that is in work, where it can go on elsewhere.

        A device that is shared is returned at each recall, and an on-policy step is sampled whole: their tickets are
        simply issued again.
        """
        if not self.device and hasattr(self, "tickets"):
            await self.tickets.drain()

    async def _fingerprint(self) -> str:
        """Fingerprint of the model; in sync mode of its folder, since nothing is loaded before the first lease."""
        if self.config.trainer.mode == "sync":
            return await asyncio.to_thread(folder_fingerprint, self.config.model)
        await self.engine.start()
        return self.engine.architecture_fingerprint

    def _open_link(self, fingerprint: str) -> None:
        """Open the connection to the learner, and in sync mode the lease of the device that both share."""
        self.link = LearnerLink(
            self.config.link_settings,
            engine=self.engine.name,
            fingerprints=(fingerprint, self.processor.fingerprint),
            in_work=lambda: self.tickets.held if hasattr(self, "tickets") else (),
            is_over=self._is_over,
            base_fingerprint=base_fingerprint(self.config.model) if self.config.model.lora.rank else "",
            scoring=self._scoring,
        )
        if self.config.trainer.mode == "sync":
            self.device = SharedDevice(
                self.config.run_path,
                self.engine,
                self.link,
                self.exporter,
                wait_timeout_s=self.config.learner.wait_timeout_s,
                heartbeat_s=self.config.network.heartbeat_s,
            )

    def _follow_weights(self, welcome: Welcome, channel: Channel, instead: Channel | None) -> None:
        """Open the receiver of weights, and the versions that it loads."""
        self.receiver = WeightReceiver(
            self.config.model.path,
            self.config.network,
            self.config.first_meeting_s,
            self.engine,
            channel,
            self.config.network.endpoint(welcome.weights_port),
            instead=instead,
            puller=open_puller(self.config.rollout.weights_channel, self.config.network, self.link.session),
        )
        self.policy_versions = PolicyVersions(
            self.config.learner.wait_timeout_s,
            self.receiver,
            self.link,
            self.exporter.loaded,
            welcome.incarnation,
            self._on_device,
        )

    def _producer(self) -> GroupProducer:
        """Make what samples and scores groups, with the environment that answers, if there is one."""
        answering = (
            environments_of(
                self.environments,
                self.config.environment,
                prompt_tokens=self.config.data.max_prompt_length,
                in_rounds=self.config.samples_in_rounds,
            )
            if self.environments
            else None
        )
        return GroupProducer(self.engine, self.rewards, self.processor, self.link.server_id, answering)

    async def _serve(self, fingerprint: str) -> None:
        self._open_link(fingerprint)
        reason, expected, ended = "stopped", True, "interrupted"
        try:
            welcome = await self.link.connect(self.exporter.said_hello)
            if welcome is None:
                ended = "finished"
                return
            self.processor.template.day = welcome.template_date or self.processor.template.day
            channel, instead = await self._channels(welcome)
            logger.info("welcomed to run %s at version %d; weights over %s", welcome.run_id, welcome.version, channel)
            self._follow_weights(welcome, channel, instead)
            if self.device and self.config.rollout.sleep_level == 2:
                self.device.on_asleep = self.policy_versions.forget
            producer = self._producer()
            async with asyncio.TaskGroup() as tasks:
                self.tickets = TicketsInWork(
                    self.config.rollout, self.link, self.exporter, self.policy_versions, producer, tasks
                )
                background = [
                    tasks.create_task(self._heartbeats()),
                    tasks.create_task(self.policy_versions.follow()),
                ]
                if self.device:
                    background.append(tasks.create_task(self.device.follow_grants()))
                farewell = await self._receive()
                reason, ended = farewell.reason, "finished" if farewell.expected else "learner_left"
                for task in [*background, *self.tickets.tasks]:
                    task.cancel()
        except ExceptionGroup as failures:
            first = failures.exceptions[0]
            if isinstance(first, EngineDied) and isinstance(first.__cause__, BadStateError):
                first = first.__cause__  # as if those who noticed it had not been quicker
            reason, expected, ended = str(first), False, "failed"
            raise first from failures
        except Exception as error:
            reason, expected, ended = str(error), False, "failed"
            raise
        else:
            if not farewell.expected:
                raise LearnerLeftError(farewell.reason)
        finally:
            self.exporter.stopped(ended)
            await self.link.goodbye(reason, expected=expected)
            self.link.close()
            if hasattr(self, "receiver"):
                self.receiver.close()

    async def _channels(self, welcome: Welcome) -> tuple[Channel, Channel | None]:
        """The channel for weights, and the one to change to where it fails."""
        configured = self.config.rollout.weights_channel
        device = open_receiver(configured, self.engine.processes) if welcome.device else None
        choose = partial(
            choose_channel,
            configured,
            same_host=welcome.host_id == self.link.host_id,
            open_network=self.config.network.is_open,
        )
        channel = choose(source=welcome.device, devices=await device.devices() if device else ())
        may_choose = channel in device_channels("auto") and configured == "auto"
        return channel, choose(source=None, devices=()) if may_choose else None

    async def _receive(self) -> Goodbye:
        """Handle messages until the learner says goodbye."""
        while True:
            message = await self.link.next_message()
            if isinstance(message, Tickets):
                self.tickets.begin(message)
            elif isinstance(message, WeightManifest):
                self.policy_versions.announce(message)
            elif isinstance(message, Welcome):
                if self.policy_versions.learner_came_back(message):
                    self.receiver.take_from_now_on(
                        *await self._channels(message), self.config.network.endpoint(message.weights_port)
                    )
                    if self.device:
                        self.device.learner_came_back()
            elif isinstance(message, LeaseGrant | LeaseRecall):
                await self._obey_lease(message)
            elif isinstance(message, Goodbye):
                logger.info("the learner says goodbye: %s", message.reason)
                return message

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

    def _on_device(self) -> AbstractAsyncContextManager[None]:
        return self.device.in_use() if self.device else nullcontext()

    async def _heartbeats(self) -> None:
        while True:
            if self._is_started:
                self.engine.check_alive()
            usage = self.engine.usage if self._is_started else EngineUsage(0, 0.0, 0)
            running = min(len(self.tickets.held), -(-usage.sequences_running // self.config.trajectories_per_group))
            beat = ServerHeartbeat(
                version=self.engine.version if self._is_started else 0,
                groups_queued=len(self.tickets.held) - running,
                groups_running=running,
                groups_unacknowledged=len(self.link.unacknowledged),
                tokens_generated=usage.tokens_generated,
                busy_s=usage.busy_s,
                uptime_s=time.monotonic() - self._started,
            )
            await self.link.send(beat)
            await self.link.resend_overdue()
            asleep = self.device is not None and not self.device.is_awake
            self.exporter.beat(
                usage, beat, heard_at=self.link.heard_at, waiting_for=self._waiting_for(asleep), is_asleep=asleep
            )
            self.exporter.totals(self.rewards, self.environments)
            await asyncio.sleep(self.config.network.heartbeat_s)

    @property
    def _is_started(self) -> bool:
        """False before our first lease of a shared device."""
        return self.device is None or self.device.is_loaded

    def _waiting_for(self, asleep: bool) -> str:
        """Name of the thing that an engine without work would wait for."""
        if self.link.learner_is_silent:
            return "learner"
        if asleep:
            return "device"
        return "weights" if self.tickets.held and self.policy_versions.is_behind else "tickets"
