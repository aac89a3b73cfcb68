"""Simulation in real time and over real sockets: the real network thread, and servers that share one thread."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.journal.writer import Journal
from asyncrl.launch.ports import free_port
from benchmarks.staleness.observation import Observation
from benchmarks.staleness.workload import (
    MODEL,
    PROCESSOR,
    VOCABULARY,
    WEIGHTS,
    ModelFreeEngine,
    OneForAll,
    TextlessProcessor,
    Workload,
)
from learner.network.servers import ModelFacts
from learner.network.thread import NetworkThread
from learner.tickets.ledger import TicketLedger
from learner.tickets.ticket_deadline import TicketDeadline
from protocol.weights import Publication, Tensor
from rollout_server.service import RolloutServer

LONGEST_WAIT_S = 60.0


class ModelFreeServer(RolloutServer):
    """A whole rollout server but for model, tokenizer and reward processes."""

    async def run(self) -> None:
        self.processor: Any = TextlessProcessor()
        self.engine: Any = ModelFreeEngine(self.config, self.processor)
        self.rewards: Any = OneForAll()
        self.environments = None
        self._scoring = ()
        await self._serve(await self._fingerprint())


def run_over_sockets(
    workload: Workload,
    server_types: Sequence[type[ModelFreeServer]] = (),
    seen: Observation | None = None,
    timeout_s: float = 10.0,
) -> Observation:
    """Run over sockets, in the workload's own seconds. `weights_s` and `latency_s` are what this machine's sockets make
    them.

    `server_types`: in place of as many good servers; `seen` is filled as the run goes on.
    """
    assert workload.bound is not None, "the bound moves only in the simulation"
    ports = {"control_port": free_port(), "weights_port": free_port(), "heartbeat_s": 0.5, "timeout_s": timeout_s}
    config = workload.config(**ports)
    seen = seen or Observation(workload)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal.sqlite")
        ledger = TicketLedger(
            journal,
            prompts_per_step=workload.prompts_per_step,
            bound=workload.first_bound,
            total_groups=workload.total_groups,
            on_stale=workload.on_stale,
            deadline=TicketDeadline(least_s=timeout_s, unmeasured_s=LONGEST_WAIT_S / 2),
        )
        publication = Publication("staleness", Path(folder))
        network = NetworkThread(
            config.network_settings,
            "staleness",
            ledger=ledger,
            write_ticket=seen.watch(workload.write_ticket, lambda: ledger.bound),
            publication=publication,
            facts=ModelFacts(MODEL, PROCESSOR, VOCABULARY),
            version=0,
        )
        servers = [kind(config) for kind in server_types or [ModelFreeServer] * workload.servers]
        serving = threading.Thread(target=_serve, args=(servers,), name="servers")
        try:
            network.start()
            serving.start()
            _learn(workload, ledger, network, publication, seen)
        finally:
            network.stop("the run is finished", run_is_finished=True)
            serving.join()
            publication.close()
            journal.close()
    seen.tokens_generated = sum(server.engine.usage.tokens_generated for server in servers)
    seen.finish()
    return seen


def _serve(servers: list[ModelFreeServer]) -> None:
    async def all_of_them() -> None:
        await asyncio.gather(*(server.run() for server in servers))

    asyncio.run(all_of_them())


def _learn(
    workload: Workload, ledger: TicketLedger, network: NetworkThread, publication: Publication, seen: Observation
) -> None:
    """learner/training_loop.py without a model."""

    def wait(satisfied: Any, what: str) -> None:
        network.wait_until(satisfied, timeout_s=LONGEST_WAIT_S, what=lambda: f"{what}: {ledger.blockers()[:5]}")

    def publish(version: int) -> None:
        manifest = publication.publish(version, [Tensor("w", "uint8", (len(WEIGHTS),), [memoryview(WEIGHTS)])])
        network.call_soon(network.servers.announce, manifest)
        network.call_soon(network.tickets.admit, version)

    wait(lambda: len(network.servers.connected) == workload.servers, "the servers")
    started = time.monotonic()
    publish(0)
    for version in range(workload.steps):
        began = time.monotonic()
        wait(ledger.ready, f"the groups of step {version + 1}")
        took = time.monotonic()
        groups = ledger.take()
        time.sleep(max(0.0, took + workload.learn_s - time.monotonic()))
        ledger.advance(version + 1)
        publish(version + 1)
        ended = time.monotonic()
        seen.step(version, groups, began=began - started, took=took - started, ended=ended - started)
        seen.account(ledger)
