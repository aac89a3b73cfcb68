"""The life of a rollout server: load, say hello, work tickets until the learner says goodbye."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any

from asyncrl.config.parts import ROLLOUT_ENGINES, device_channels
from asyncrl.config.schema import RunConfig
from asyncrl.devices.device import check_device_channel, resolve_device
from asyncrl.errors import BadStateError, LearnerLeftError
from asyncrl.journal.run_inputs import scoring_fingerprints, scoring_settings
from asyncrl.model_files.folder import base_fingerprint
from asyncrl.models.lora import folder_fingerprint
from asyncrl.processing.processor import PromptProcessor
from asyncrl.rewards.scorer import RewardScorer
from protocol.errors import ErrorCode, ProtocolError
from protocol.faults import crash_point
from protocol.messages import (
    Channel,
    Error,
    Goodbye,
    Group,
    LeaseGrant,
    LeaseRecall,
    ServerHeartbeat,
    Ticket,
    TicketFailed,
    Tickets,
    WeightManifest,
    Welcome,
)
from rollout_server.engines import create_engine
from rollout_server.engines.base import EngineDied, EngineUsage
from rollout_server.exporter import create_exporter
from rollout_server.link import LearnerLink
from rollout_server.production.environments import environment_workers, environments_of
from rollout_server.production.group_producer import (
    Answer,
    GroupProducer,
    check_sampling,
    ticket_as_it_came,
    ticket_failed,
)
from rollout_server.shared_device import SharedDevice
from rollout_server.weights.channels import choose_channel, open_puller, open_receiver
from rollout_server.weights.policy_versions import PolicyVersions
from rollout_server.weights.receiver import WeightReceiver

logger = logging.getLogger(__name__)
DRAINING_S = 10.0
"""Longest time in which a server that is asked to end gives its tickets back: a spot machine has 30 s."""


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
        self._held: dict[int, Ticket] = {}
        self._not_begun: set[int] = set()
        """Tickets that wait for weights."""
        self._drains = False
        """True once it was asked to end: it begins nothing any more."""
        self.device: SharedDevice | None = None
        """Lease of a device that is shared with the learner; None: this server has a device of its own."""

    async def run(self) -> None:
        """Serve until the run is finished; raises LearnerLeftError or the failure."""
        check_device_channel(self.config.rollout, "rollout.device", self.config.rollout.device)
        self.exporter.serve()
        self.processor = PromptProcessor(self.config.model)
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
        """Give back all that is in work, as it is, for others to go on with; what is complete is scored and sent.

        A device that is shared is returned at each recall, and an on-policy step is sampled whole: their tickets are
        simply issued again, and so are conversations, whose environments stay here.
        """
        self._drains = True
        if self.device or not hasattr(self, "producer"):
            return
        movable = {ticket_id for ticket_id, ticket in self._held.items() if not ticket.conversation}
        if not movable:
            return
        logger.info("ending: %d tickets go back to the learner as they are", len(movable))
        try:
            async with asyncio.timeout(DRAINING_S):
                await self._interrupt(movable)
                while movable & self._held.keys():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            logger.warning("%d tickets did not come to an end in %g s", len(movable & self._held.keys()), DRAINING_S)

    async def _interrupt(self, movable: set[int]) -> None:
        """Give these tickets back: what has not begun as it came, the rest as it is by now."""
        while waiting := self._not_begun.intersection(movable):  # each answer takes time, in which others may begin
            ticket = self._held[waiting.pop()]
            await self._answer(ticket, ticket_as_it_came(ticket))
        await self.producer.interrupt(movable)

    async def _fingerprint(self) -> str:
        """Fingerprint of the model; in sync mode of its folder, since nothing is loaded before the first lease."""
        if self.config.trainer.mode == "sync":
            return await asyncio.to_thread(folder_fingerprint, self.config.model)
        await self.engine.start()
        return self.engine.architecture_fingerprint

    async def _serve(self, fingerprint: str) -> None:
        self.link = LearnerLink(
            self.config.link_settings,
            engine=self.engine.name,
            fingerprints=(fingerprint, self.processor.fingerprint),
            in_work=lambda: self._held,
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
        reason, expected, ended = "stopped", True, "interrupted"
        try:
            welcome = await self.link.connect(self.exporter.said_hello)
            if welcome is None:
                ended = "finished"
                return
            self.processor.template.day = welcome.template_date or self.processor.template.day
            channel, instead = await self._channels(welcome)
            logger.info("welcomed to run %s at version %d; weights over %s", welcome.run_id, welcome.version, channel)
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
            if self.device and self.config.rollout.sleep_level == 2:
                self.device.on_asleep = self.policy_versions.forget
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
            self.producer = GroupProducer(self.engine, self.rewards, self.processor, self.link.server_id, answering)
            async with asyncio.TaskGroup() as self._tasks:
                background = [
                    self._tasks.create_task(self._heartbeats()),
                    self._tasks.create_task(self.policy_versions.follow()),
                ]
                if self.device:
                    background.append(self._tasks.create_task(self.device.follow_grants()))
                farewell = await self._receive()
                reason, ended = farewell.reason, "finished" if farewell.expected else "learner_left"
                for task in [*background, *self._work]:
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
        self._work: set[asyncio.Task[None]] = set()
        while True:
            message = await self.link.next_message()
            if isinstance(message, Tickets):
                self._begin(message)
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

    def _begin(self, message: Tickets) -> None:
        """Start what is new; after a reconnection the learner may send tickets that are in work or sent already."""
        new = tuple(
            ticket
            for ticket in message.tickets
            if ticket.ticket_id not in self._held and ticket.ticket_id not in self.link.unacknowledged
        )
        if not new or self._drains:
            return
        self._held |= {ticket.ticket_id: ticket for ticket in new}
        self._in_background(self._work_tickets(message.model_copy(update={"tickets": new})))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run in the background until the learner says goodbye."""
        task = self._tasks.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _work_tickets(self, message: Tickets) -> None:
        """Produce the groups of one message. A fault that is no single ticket's fails all that are unanswered."""

        def unanswered() -> list[Ticket]:  # one that was given back may be here again, by another message
            return [ticket for ticket in message.tickets if self._held.get(ticket.ticket_id) is ticket]

        self._not_begun |= {ticket.ticket_id for ticket in message.tickets}
        try:
            check_sampling(message.tickets, self.config.rollout)
            async with self.policy_versions.at_least(max(ticket.begins_at for ticket in message.tickets)):
                crash_point("ticket.started")
                begins = {ticket.ticket_id: ticket for ticket in unanswered()}
                self._not_begun -= begins.keys()
                async for answer in self.producer.produce(tuple(begins.values()), message.blobs):
                    await self._answer(begins[answer.ticket_id], answer)
        except EngineDied:
            raise  # they stay in work: our goodbye gives them back, and it is not counted against them
        except Exception as error:
            failed = unanswered()
            logger.exception("tickets %s failed", sorted(ticket.ticket_id for ticket in failed))
            for ticket in failed:
                await self._answer(ticket, ticket_failed(ticket, error))

    async def _answer(self, ticket: Ticket, answer: Answer) -> None:
        """Send the group of a ticket, or what there is of it, or say why there is none."""
        if isinstance(answer, Group):
            try:
                await self.link.send_group(answer)
                self.exporter.produced(answer)
            except ProtocolError as error:  # it is too large to travel, or has odd values
                logger.exception("ticket %d (row %s) failed", ticket.ticket_id, ticket.prompt.row_id)
                answer = ticket_failed(ticket, error)
        self._held.pop(ticket.ticket_id, None)
        self._not_begun.discard(ticket.ticket_id)
        if isinstance(answer, TicketFailed):
            self.exporter.ticket_failed(answer.error_kind)
        if not isinstance(answer, Group):
            crash_point("ticket.returning")
            await self.link.send(answer)

    def _on_device(self) -> AbstractAsyncContextManager[None]:
        return self.device.in_use() if self.device else nullcontext()

    async def _heartbeats(self) -> None:
        while True:
            if self._is_started:
                self.engine.check_alive()
            usage = self.engine.usage if self._is_started else EngineUsage(0, 0.0, 0)
            running = min(len(self._held), -(-usage.sequences_running // self.config.trajectories_per_group))
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
        return "weights" if self._held and self.policy_versions.is_behind else "tickets"
