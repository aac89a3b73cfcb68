"""Steps per second where one of two servers stops sampling and goes on sending heartbeats.

    python -m benchmarks.wedged_server

The real network thread, ledger and journal, and two servers with the scripted engine, over sockets and in real time;
network.timeout_s is 2 s, which is the smallest deadline of a ticket, and the learner waits for a step for 20 s at most.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import benchmarks.staleness.sockets as sockets
from asyncrl.errors import WaitTimeoutError
from benchmarks.staleness.observation import Observation
from benchmarks.staleness.sockets import ModelFreeServer, run_over_sockets
from benchmarks.staleness.workload import ModelFreeEngine, Workload
from rollout_server.engines.base import Completion, GenerationRequest

WORKLOAD = Workload(
    servers=2, bound=1, steps=40, prompts_per_step=16, sequences=128, seconds_per_token=0.02, longest=32, learn_s=0.1
)
WEDGED_AFTER_TOKENS = 4_000
TIMEOUT_S = 2.0
sockets.LONGEST_WAIT_S = 20.0


class WedgingEngine(ModelFreeEngine):
    """Finishes nothing more once it has sampled so many tokens."""

    async def _sample(self, request: GenerationRequest, index: int) -> Completion:
        completion = await super()._sample(request, index)
        if self.usage.tokens_generated > WEDGED_AFTER_TOKENS:
            await asyncio.Event().wait()
        return completion


class WedgingServer(ModelFreeServer):
    async def _serve(self, fingerprint: str) -> None:
        engine: Any = WedgingEngine(self.config, self.processor)
        await engine.start()
        self.engine = engine
        await super()._serve(fingerprint)


def main() -> None:
    print("| servers | steps | steps/s | longest wait for a step | |\n|---|---:|---:|---:|---|")
    for name, types in (
        ("two", [ModelFreeServer, ModelFreeServer]),
        ("one", [ModelFreeServer]),
        ("two, one of them wedged after a while", [ModelFreeServer, WedgingServer]),
    ):
        workload = Workload(**{**vars(WORKLOAD), "servers": len(types)})
        seen, ended, began = Observation(workload), "finished", time.monotonic()
        try:
            run_over_sockets(workload, types, seen, TIMEOUT_S)
        except WaitTimeoutError as error:
            ended = f"stopped: {str(error)[:60]}"
        seconds = seen.ended[-1] if ended == "finished" else time.monotonic() - began
        steps = len(seen.ended)
        print(f"| {name} | {steps} | {steps / seconds:.2f} | {max(seen.waits):.1f} s | {ended} |", flush=True)


if __name__ == "__main__":
    main()
