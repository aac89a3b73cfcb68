"""How long a finished group stays on its server: from the end of its last completion until it is sent.

    python -m benchmarks.group_delay

The scripted engine samples one message of tickets at a time, with log-normal lengths; the group producer is the real
one, rewards take no time, and the clock is virtual: what is left is the delay that the server itself adds.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import numpy as np

from asyncrl.journal.writer import TicketSlot
from benchmarks.staleness.virtual_time import run_in_virtual_time
from benchmarks.staleness.workload import ModelFreeEngine, OneForAll, TextlessProcessor, Workload
from rollout_server.engines.base import GenerationRequest
from rollout_server.production.group_producer import GroupProducer

MESSAGES = 50
TICKETS = (1, 4, 16)
"""Tickets of one message: what a server gets when it has that much room."""
SIGMAS = (0.5, 1.0, 1.5)


class WatchedEngine(ModelFreeEngine):
    """Notes when the last completion of each request ended."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.ended: dict[int, float] = defaultdict(float)

    async def _sample(self, request: GenerationRequest, index: int) -> Any:
        completion = await super()._sample(request, index)
        self.ended[request.request_id] = asyncio.get_running_loop().time()
        return completion


async def delays_s(workload: Workload, tickets: int) -> list[float]:
    """Seconds of each group, of MESSAGES messages."""
    processor: Any = TextlessProcessor()
    rewards: Any = OneForAll()
    engine = WatchedEngine(workload.config(), processor)
    producer = GroupProducer(engine, rewards, processor, "server")
    delays = []
    for message in range(MESSAGES):
        ids = range(message * tickets, (message + 1) * tickets)
        written = [workload.write_ticket(TicketSlot(i, i, version=0, bound=0)).ticket for i in ids]
        async for group in producer.produce(written, {}):
            delays.append(asyncio.get_running_loop().time() - engine.ended[group.ticket_id])
    return delays


def main() -> None:
    base = Workload(servers=1, bound=0)
    speed = f"{base.seconds_per_token:g} s per token, {base.median_length:g} tokens (median), {base.longest} at most"
    print(f"Groups of {base.group_size}, {speed}; virtual seconds.\n")
    print("| sigma of lengths | tickets of a message | median | p90 | p99 | longest |\n|---:|---:|---:|---:|---:|---:|")
    for sigma in SIGMAS:
        for tickets in TICKETS:
            found = run_in_virtual_time(delays_s(Workload(servers=1, bound=0, length_sigma=sigma), tickets))
            cells = [f"{quantile:.2f}" for quantile in np.quantile(found, (0.5, 0.9, 0.99, 1.0))]
            print(f"| {sigma:g} | {tickets} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
