"""A learner without a model: the real exchange, ledger, verification and publication, and a loop that takes batches."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil

from asyncrl.config.schema import RunConfig
from asyncrl.models.processing import EncodedPrompt
from learner.exchange import Exchange, ModelFacts
from learner.tickets import PreparedTicket, TicketLedger
from protocol.endpoints import free_port
from protocol.weights import Publication, Tensor
from tests.fuzz import content

PER_STEP = 8
ENDLESS = 10**8
STALL_S = 60.0
"""No batch for so long, with a good server at work, is a hang."""


class PromptsKnown:
    """Stands for the prompt processor: what each prompt must encode to."""

    def encode(self, prompt: Any, _blobs: Any) -> EncodedPrompt:
        ticket_id = int(prompt.row_id.removeprefix("fuzz:"))
        ids = content.prompt_ids(ticket_id)
        return EncodedPrompt(prompt.row_id, ids, np.zeros_like(ids), content.image_grids(), prompt.image_hashes, None)


def small_config(**network: Any) -> RunConfig:
    ports = {"control_port": free_port(), "weights_port": free_port(), "heartbeat_s": 0.2, "timeout_s": 3.0}
    return RunConfig.model_validate(
        {
            "run_dir": "fuzz",
            "model": {"path": "none"},
            "data": {"train_files": ["none"]},
            "reward": {"functions": [{"function": "exact_match"}]},
            "network": {**ports, **network},
        }
    )


class LearnerRig:
    """`turn` plays the main thread: it takes a batch when there is one, and publishes the next version."""

    def __init__(self, config: RunConfig, folder: Path):
        self.config = config
        self.ledger = TicketLedger(prompts_per_step=PER_STEP, max_staleness=1, total_groups=ENDLESS)
        self.publication = Publication("fuzz", folder)
        self.exchange = Exchange(
            config,
            "fuzz",
            ledger=self.ledger,
            processor=cast(Any, PromptsKnown()),
            publication=self.publication,
            facts=ModelFacts(content.MODEL, content.PROCESSOR, content.VOCABULARY),
            version=0,
        )
        self.version = 0
        self.taken: list[int] = []
        self.wrong: list[int] = []
        """Groups that got past verification and are not what their tickets demand."""
        self._progress_at = time.monotonic()
        self._process = psutil.Process()
        self._weights = np.random.default_rng(0).bytes(4 << 20)

    def start(self) -> None:
        self.exchange.start()
        self._publish()

    def turn(self) -> None:
        """Raises what stopped the exchange, or AssertionError after STALL_S without a batch."""
        with self.ledger.changed:
            if self.exchange.failure is not None:
                raise self.exchange.failure
            if not self.ledger.ready(self.version):
                self.ledger.changed.wait(0.1)
        if self.ledger.ready(self.version):
            for received in self.ledger.take(self.version):
                self.taken.append(received.ticket.ticket_id)
                if not content.is_right(received.group):
                    self.wrong.append(received.ticket.ticket_id)
            self.version += 1
            self._publish()
            self._progress_at = time.monotonic()
        assert self.exchange.is_alive(), "the exchange has ended"
        assert time.monotonic() - self._progress_at < STALL_S, f"no batch for {STALL_S:g} s: {self.ledger.counts()}"

    def _publish(self) -> None:
        manifest = self.publication.publish(
            self.version, [Tensor("w", "uint8", (len(self._weights),), memoryview(self._weights))]
        )
        self.exchange.announce(manifest)
        version = self.version
        self.exchange.dispatch(lambda: self._prepare(version))

    def _prepare(self, version: int) -> Iterator[PreparedTicket]:
        for ticket_id in self.ledger.admissible(version):
            digest, data = content.image(ticket_id)
            yield PreparedTicket(content.ticket(ticket_id, version), {digest: data})

    def rss_mib(self) -> float:
        gc.collect()
        return self._process.memory_info().rss / 2**20

    def problems(self, check_journal: Callable[[], list[str]] = list) -> list[str]:
        """What a hostile peer must not be able to cause. `check_journal` looks at what is on disk."""
        found = list(check_journal())
        residual = self.ledger.counts().residual
        if residual:
            found.append(f"ledger residual {residual}")
        if self.wrong:
            found.append(f"wrong groups were taken: {self.wrong[:10]}")
        if len(set(self.taken)) != len(self.taken):
            found.append("a group was taken twice")
        if set(self.taken) != set(range(len(self.taken))) and sorted(self.taken) != list(range(len(self.taken))):
            missing = set(range(max(self.taken))) - set(self.taken)
            if len(missing) > 2 * PER_STEP:  # more than may be on their way
                found.append(f"tickets never came: {sorted(missing)[:10]}")
        if len(self.exchange.errors) > 70:
            found.append(f"{len(self.exchange.errors)} kinds of errors: a peer's words became labels")
        return found

    def close(self) -> None:
        self.exchange.stop("the fuzzing is over")
        self.publication.close()
