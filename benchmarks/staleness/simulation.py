"""A whole run in virtual time.

Real are the learner's ledger, journal, handing out and intake, and of each server the service logic and the scripted
engine. Simulated are the sockets (a delay per message, in order), the weight transfer (a delay per server and version)
and the learner's step (a fixed time).
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.writer import Journal, TicketSlot
from benchmarks.staleness.observation import Observation
from benchmarks.staleness.virtual_time import run_in_virtual_time
from benchmarks.staleness.workload import (
    LARGEST_BOUND,
    MODEL,
    PROCESSOR,
    VOCABULARY,
    ModelFreeEngine,
    OneForAll,
    TextlessProcessor,
    Workload,
)
from learner.groups.group_verification import verify_group
from learner.groups.ticket import PreparedTicket
from learner.network.group_receiver import GroupReceiver
from learner.network.servers import ServerState
from learner.network.thread import POLL_S
from learner.network.ticket_sender import TicketSender
from learner.tickets.ledger import TicketLedger
from protocol.codec import Limits
from protocol.messages import (
    Ack,
    Goodbye,
    Group,
    Hello,
    Message,
    TicketFailed,
    WeightManifest,
    WeightsLoaded,
)
from rollout_server.production.group_producer import GroupProducer
from rollout_server.service import RolloutServer
from rollout_server.tickets_in_work import TicketsInWork
from rollout_server.weights.policy_versions import PolicyVersions

LONGEST_WAIT_S = 600.0
BOUND_MOVES_EVERY = 3
"""Steps, where the bound moves."""


class InOrder:
    """Delivers what is sent after a delay, in the order of sending."""

    def __init__(self, deliver: Callable[[Any], None], delay_s: float):
        self._deliver = deliver
        self._delay_s = delay_s
        self._under_way: deque[Any] = deque()

    def send(self, message: Any) -> None:
        self._under_way.append(message)
        asyncio.get_running_loop().call_later(self._delay_s, lambda: self._deliver(self._under_way.popleft()))


class SimulatedLink:
    """Link with the part of LearnerLink that a RolloutServer needs."""

    def __init__(self, server_id: str, to_learner: InOrder):
        self.server_id = server_id
        self.unacknowledged: dict[int, Group] = {}
        self.inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._to_learner = to_learner

    async def next_message(self) -> Message | None:
        message = await self.inbox.get()
        if not isinstance(message, Ack):
            return message
        for ticket_id in message.ticket_ids:
            del self.unacknowledged[ticket_id]
        return None

    async def send_group(self, group: Group) -> None:
        self.unacknowledged[group.ticket_id] = group
        await self.send(group)

    async def send(self, message: Message) -> None:
        self._to_learner.send(message)


class DelayedWeights:
    """Weights with the part of WeightReceiver that a RolloutServer needs."""

    def __init__(self, engine: ModelFreeEngine, draw_delay: Callable[[], float]):
        self._engine = engine
        self._draw_delay = draw_delay

    async def load(self, manifest: WeightManifest) -> WeightsLoaded:
        delay_s = self._draw_delay()
        await asyncio.sleep(delay_s)
        await self._engine.update_weights(manifest.version, ())
        return WeightsLoaded(version=manifest.version, channel="shm", transfer_s=delay_s, load_s=0.0)


class SimulatedServer(RolloutServer):
    """The service between its link and its engine."""

    def __init__(self, workload: Workload, link: SimulatedLink, random_numbers: random.Random):
        super().__init__(workload.config())
        self.link: Any = link
        self.processor: Any = TextlessProcessor()
        self.engine: Any = ModelFreeEngine(self.config, self.processor)
        weights: Any = DelayedWeights(self.engine, lambda: random_numbers.uniform(*workload.weights_s))
        self.policy_versions = PolicyVersions(
            self.config.learner.wait_timeout_s, weights, self.link, self.exporter.loaded, "", nullcontext
        )
        self.rewards: Any = OneForAll()
        self.producer = GroupProducer(self.engine, self.rewards, self.processor, link.server_id)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self.tickets = TicketsInWork(
                self.config.rollout, self.link, self.exporter, self.policy_versions, self.producer, tasks
            )
            following = tasks.create_task(self.policy_versions.follow())
            await self._receive()
            following.cancel()


class SimulatedServers:
    """Servers with the part that TicketSender and GroupReceiver need: the connected ones, and a way to each."""

    def __init__(self, max_groups: int):
        self.connected: dict[str, ServerState] = {}
        self.aligned = self.connected
        self.version = 0
        self.errors: Counter[str] = Counter()
        self._max_groups = max_groups
        self._to_server: dict[str, InOrder] = {}

    def welcome(self, server_id: str, to_server: InOrder) -> None:
        hello = Hello(
            server_id=server_id,
            session=server_id,
            host_id="here",
            engine="scripted",
            model_fingerprint=MODEL,
            processor_fingerprint=PROCESSOR,
            max_groups=self._max_groups,
            pid=1,
        )
        self.connected[server_id] = ServerState(hello, server_id.encode())
        self._to_server[server_id] = to_server

    def send(self, server_id: str, message: Message) -> bool:
        self._to_server[server_id].send(message)
        return True

    def send_to_all(self, message: Message) -> None:
        for server_id in self.connected:
            self.send(server_id, message)


class SimulatedNetwork:
    """The turns of learner/network/thread.py, between links instead of sockets."""

    def __init__(self, workload: Workload, ledger: TicketLedger, write_ticket: Callable[[TicketSlot], PreparedTicket]):
        config = workload.config()
        self.changed = asyncio.Event()
        self.connections: Any = SimulatedServers(config.groups_in_flight)
        verify = partial(verify_group, vocabulary=VOCABULARY, components=config.reward.component_names)
        no_ports: Any = None  # of use only to charge a server for a refused group, and none is refused
        self._tickets = TicketSender(self.connections, ledger, write_ticket, Limits())
        self._groups = GroupReceiver(self.connections, no_ports, ledger, verify)
        self._turn_is_due = False
        asyncio.get_running_loop().call_later(POLL_S, self._poll)
        self.servers = [self._connect(workload, f"server-{number}") for number in range(workload.servers)]

    def _connect(self, workload: Workload, server_id: str) -> SimulatedServer:
        link = SimulatedLink(server_id, InOrder(partial(self._receive, server_id), workload.latency_s))
        self.connections.welcome(server_id, InOrder(link.inbox.put_nowait, workload.latency_s))
        return SimulatedServer(workload, link, random.Random(f"{workload.seed} {server_id}"))

    def announce(self, version: int) -> None:
        self.connections.version = version
        for server in self.connections.connected.values():
            server.told = version
        self.connections.send_to_all(WeightManifest(version=version, publication="p", tensors=(), total_bytes=0))

    def admit(self, version: int) -> None:
        self._tickets.admit(version)
        self._need_turn()

    def _receive(self, server_id: str, message: Message) -> None:
        assert not isinstance(message, TicketFailed), message
        if isinstance(message, Group):
            self._groups.accept(server_id, message, ())
            self._need_turn()

    def _poll(self) -> None:
        """Poll as the network thread does where nothing arrives."""
        self._need_turn()
        asyncio.get_running_loop().call_later(POLL_S, self._poll)

    def _need_turn(self) -> None:
        """One for all that happens at this moment."""
        if not self._turn_is_due:
            self._turn_is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_is_due = False
        self._groups.keep()
        self._tickets.work()
        self.changed.set()
        if self._tickets.is_busy:
            self._need_turn()


async def _learn(workload: Workload, ledger: TicketLedger, network: SimulatedNetwork, seen: Observation) -> None:
    """learner/training_loop.py without a model."""
    loop = asyncio.get_running_loop()
    moves = random.Random(f"bound {workload.seed}")
    network.announce(0)
    network.admit(0)
    for version in range(workload.steps):
        began = loop.time()
        while not ledger.ready():
            network.changed.clear()
            try:
                await asyncio.wait_for(network.changed.wait(), LONGEST_WAIT_S)
            except TimeoutError:
                seen.problems.append(f"step {version + 1} waited {LONGEST_WAIT_S:g} s for {ledger.blockers()[:5]}")
                return
        took = loop.time()
        groups = ledger.take()
        await asyncio.sleep(workload.learn_s)
        if workload.bound is None and version % BOUND_MOVES_EVERY == 0:
            ledger.bound = moves.randint(1, LARGEST_BOUND)
        ledger.advance(version + 1)
        network.announce(version + 1)
        network.admit(version + 1)
        seen.step(version, groups, began=began, took=took, ended=loop.time())
        seen.account(ledger)
        if version % 8 == 7:
            ledger.forget_payloads(version + 1)


async def _run(workload: Workload, journal: Journal) -> Observation:
    seen = Observation(workload)
    ledger = TicketLedger(
        journal,
        prompts_per_step=workload.prompts_per_step,
        bound=workload.first_bound,
        total_groups=workload.total_groups,
        on_stale=workload.on_stale,
    )
    network = SimulatedNetwork(workload, ledger, seen.watch(workload.write_ticket, lambda: ledger.bound))
    serving = [asyncio.create_task(server.run()) for server in network.servers]
    await _learn(workload, ledger, network, seen)
    network.connections.send_to_all(Goodbye(reason="the run is finished"))
    await asyncio.gather(*serving)
    seen.tokens_generated = sum(server.engine.usage.tokens_generated for server in network.servers)
    seen.finish()
    return seen


def simulate(workload: Workload) -> Observation:
    """Raises NothingToWaitFor on a deadlock. The same workload gives the same observation, to the last bit."""
    with TemporaryDirectory() as folder, closing(Journal(Path(folder) / JOURNAL_FILE)) as journal:
        return run_in_virtual_time(_run(workload, journal))
