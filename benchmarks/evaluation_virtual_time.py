"""Wall-clock of runs with and without evaluations in virtual time: beside training, and with a learner that waits.

    python -m benchmarks.evaluation_virtual_time [--rows 64] [--every 10]

Exact, and the same on every machine (benchmarks/staleness/simulation.py). Real besides what is real there: the
learner's servers and evaluation sender, and on the servers the policy versions. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.writer import Journal, TicketSlot
from benchmarks.staleness.simulation import InOrder, SimulatedLink, SimulatedNetwork, SimulatedServer, SimulatedServers
from benchmarks.staleness.virtual_time import run_in_virtual_time
from benchmarks.staleness.workload import MODEL, PROCESSOR, VOCABULARY, Workload
from learner.groups.ticket import PreparedTicket
from learner.network.servers import ModelFacts, Servers
from learner.network.ticket_sender import EvaluationSender
from learner.tickets.evaluation import Evaluation
from learner.tickets.ledger import TicketLedger
from protocol.messages import Goodbye, Message, TicketKind, WeightManifest
from protocol.sockets import Delivery

EVALUATION_IDS = 2**40


class Routes:
    """The learner's sockets: a way to each server."""

    def __init__(self) -> None:
        self.control: Any = self
        self.to_server: dict[bytes, InOrder] = {}

    def send(self, identity: bytes, message: Message) -> Delivery:
        self.to_server[identity].send(message)
        return Delivery.SENT


class EvaluatingNetwork(SimulatedNetwork):
    """The simulated network, with the real account of who was told of which version."""

    def __init__(self, workload: Workload, ledger: TicketLedger, write_ticket: Callable[[TicketSlot], PreparedTicket]):
        self._routes: Any = Routes()
        facts = ModelFacts(MODEL, PROCESSOR, VOCABULARY)
        self._real = Servers(
            workload.config().network,
            workload.config().trainer.mode,
            workload.config().rollout.quantization,
            "run",
            self._routes,
            ledger,
            facts,
        )
        super().__init__(workload, ledger, write_ticket)
        publication: Any = SimpleNamespace(release=lambda version: None)  # the simulated one keeps every version
        self.connections = self._tickets.servers = self._groups.servers = self._real
        self._evaluations = EvaluationSender(self._real, ledger, self._tickets, publication)

    def _connect(self, workload: Workload, server_id: str) -> SimulatedServer:
        link = SimulatedLink(server_id, InOrder(partial(self._receive, server_id), workload.latency_s))
        to_server = InOrder(link.inbox.put_nowait, workload.latency_s)
        templates: SimulatedServers = self.connections
        templates.welcome(server_id, to_server)
        self._real.connected[server_id] = templates.connected[server_id]
        self._real.connected[server_id].aligned = True
        self._routes.to_server[server_id.encode()] = to_server
        return SimulatedServer(workload, link, random.Random(f"{workload.seed} {server_id}"))

    def announce(self, version: int) -> None:
        self._real.announce(WeightManifest(version=version, publication="p", tensors=(), total_bytes=0))

    def evaluate(self, evaluation: Evaluation) -> None:
        self._evaluations.begin(evaluation)
        self._need_turn()

    def _turn(self) -> None:
        self._groups.keep()
        self._evaluations.work()
        has_ordered = self._tickets.is_busy
        super()._turn()
        if has_ordered:  # training tickets are looked for when the ordered ones are written
            self._need_turn()


def write_row(workload: Workload, rows: int, index: int, version: int) -> PreparedTicket:
    slot = TicketSlot(EVALUATION_IDS + version * rows + index, index, version, bound=0)
    item = workload.write_ticket(slot)
    return replace(item, ticket=item.ticket.model_copy(update={"kind": TicketKind.EVAL, "group_size": 1}))


async def run(workload: Workload, journal: Journal, rows: int, every: int, *, waits: bool) -> tuple[float, float]:
    """Seconds of the run, and those that the learner waited for an evaluation alone. Without rows none is made."""
    loop, waited_s = asyncio.get_running_loop(), 0.0
    ledger = TicketLedger(
        journal,
        prompts_per_step=workload.prompts_per_step,
        bound=workload.first_bound,
        total_groups=workload.total_groups,
    )
    network = EvaluatingNetwork(workload, ledger, workload.write_ticket)
    serving = [asyncio.create_task(server.run()) for server in network.servers]

    async def until(is_so: Callable[[], bool]) -> None:
        while not is_so():
            network.changed.clear()
            await network.changed.wait()

    network.announce(0)
    network.admit(0)
    for step in range(1, workload.steps + 1):
        await until(ledger.ready)
        ledger.take()
        await asyncio.sleep(workload.learn_s)
        ledger.advance(step)
        network.announce(step)
        network.admit(step)
        if rows and step % every == 0 and step < workload.steps:
            began = loop.time()
            await until(lambda: ledger.evaluation is None or ledger.evaluation.is_complete)
            ledger.evaluation = Evaluation(step, step, rows, partial(write_row, workload, rows), ledger.changed)
            network.evaluate(ledger.evaluation)
            if waits:
                await until(lambda: ledger.evaluation is None or ledger.evaluation.is_complete)
            waited_s += loop.time() - began
    seconds = loop.time()
    await until(lambda: ledger.evaluation is None or ledger.evaluation.is_complete)
    network.connections.send_to_all(Goodbye(reason="the run is finished"))
    await asyncio.gather(*serving)
    return seconds, waited_s


def simulated(workload: Workload, rows: int, every: int, *, waits: bool = False) -> float:
    with TemporaryDirectory() as folder, closing(Journal(Path(folder) / JOURNAL_FILE)) as journal:
        return run_in_virtual_time(run(workload, journal, rows, every, waits=waits))[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="held-out rows")
    parser.add_argument("--every", type=int, default=10, help="steps between two evaluations")
    arguments = parser.parse_args()
    print("| slow side | servers | max_staleness | none, s | the learner waits | beside training | saved |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for slow, learn_s in (("servers", 1.0), ("learner", 3.0)):
        for servers, bound in ((1, 1), (1, 2), (1, 4)):
            workload = Workload(servers=servers, bound=bound, learn_s=learn_s, steps=29, prompts_per_step=16)
            none = simulated(workload, 0, arguments.every)
            waits = simulated(workload, arguments.rows, arguments.every, waits=True)
            beside = simulated(workload, arguments.rows, arguments.every)
            saved = f"{(waits - beside) / (waits - none):.0%}"
            cells = f"{none:.0f} | {waits:.0f} (+{waits - none:.0f}) | {beside:.0f} (+{beside - none:.0f}) | {saved}"
            print(f"| {slow} | {servers} | {bound} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
