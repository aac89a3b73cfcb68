"""A learner without a model: the real network thread, ledger and publication, and a loop that takes batches."""

from __future__ import annotations

import ctypes
import gc
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from asyncrl.config.schema import RunConfig
from asyncrl.journal.writer import Journal, TicketSlot
from asyncrl.processing.encoded_prompt import EncodedPrompt
from learner.groups.ticket import PreparedTicket
from learner.network.servers import ModelFacts
from learner.network.thread import NetworkThread
from learner.tickets.ledger import TicketLedger
from protocol.weights import Publication, Tensor
from tests.rigs.fuzz import content
from tests.rigs.ports import own_port

PER_STEP = 8
ENDLESS = 10**8
CHECKPOINT_EVERY = 10
"""Steps after which the journal may forget the groups that were taken."""
MOST_KINDS = 80
STALL_S = 60.0
"""No batch for so long, with a good server at work, is a hang."""


def write_ticket(slot: TicketSlot) -> PreparedTicket:
    """Nothing is dropped, so ids and positions in the data are the same."""
    assert slot.ticket_id == slot.position
    digest, data = content.image(slot.ticket_id)
    ids = content.prompt_ids(slot.ticket_id)
    measured = EncodedPrompt("row", ids, np.zeros_like(ids), content.IMAGE_GRIDS, (digest,))
    return PreparedTicket(content.ticket(slot.ticket_id, slot.version), {digest: data}, slot, measured)


def small_config(**network: Any) -> RunConfig:
    ports = {"control_port": own_port(), "weights_port": own_port(), "heartbeat_s": 0.2, "timeout_s": 3.0}
    return RunConfig.model_validate(
        {
            "run_dir": "fuzz",
            "model": {"path": "none"},
            "data": {"train_files": ["none"]},
            "reward": {"functions": [{"function": "exact_match"}]},
            "network": {**ports, **network},
        }
    )


def memory_mib() -> float:
    """Resident memory of this process, without what the allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss / 2**20


class LearnerRig:
    """`turn` plays the main thread: it takes a batch when there is one, and publishes the next version."""

    def __init__(self, config: RunConfig, folder: Path):
        self.config = config
        self.endpoints = (config.network.control_endpoint, config.network.weights_endpoint)
        self.journal_path = folder / "journal.db"
        self.journal = Journal(self.journal_path)
        self.ledger = TicketLedger(self.journal, prompts_per_step=PER_STEP, bound=1, total_groups=ENDLESS)
        self.publication = Publication("fuzz", folder)
        self.network = NetworkThread(
            config.network_settings,
            "fuzz",
            ledger=self.ledger,
            write_ticket=write_ticket,
            publication=self.publication,
            facts=ModelFacts(content.MODEL, content.PROCESSOR, content.VOCABULARY),
            version=0,
        )
        self.version = 0
        self.taken: list[int] = []
        self.wrong: list[int] = []
        """Groups that got past verification and are not what their tickets demand."""
        self._progress_at = time.monotonic()
        self._weights = np.random.default_rng(0).bytes(4 << 20)

    def start(self) -> None:
        self.network.start()
        self._publish()

    def turn(self) -> None:
        """Raises what stopped the network thread, or AssertionError after STALL_S without a batch."""
        with self.ledger.changed:
            self.network.check()
            if not self.ledger.ready():
                self.ledger.changed.wait(0.1)
        if self.ledger.ready():
            for received in self.ledger.take():
                self.taken.append(received.ticket.ticket_id)
                if not content.is_right(received.group):
                    self.wrong.append(received.ticket.ticket_id)
            self.version += 1
            self.ledger.advance(self.version)
            if self.version % CHECKPOINT_EVERY == 0:
                self.ledger.forget_payloads(self.version)
            self._publish()
            self._progress_at = time.monotonic()
        assert self.network.is_alive, "the network thread has ended"
        assert time.monotonic() - self._progress_at < STALL_S, f"no batch for {STALL_S:g} s: {self.ledger.counts()}"

    def _publish(self) -> None:
        manifest = self.publication.publish(
            self.version, [Tensor("w", "uint8", (len(self._weights),), [memoryview(self._weights)])]
        )
        self.network.call_soon(self.network.servers.announce, manifest)
        self.network.call_soon(self.network.tickets.admit, self.version)

    def take(self, groups: int) -> None:
        """Turn until so many more groups have been taken."""
        enough = len(self.taken) + groups
        while len(self.taken) < enough:
            self.turn()

    def problems(self) -> list[str]:
        """Check what a hostile peer must not be able to cause; the run goes on meanwhile."""
        missing = set(range(max(self.taken, default=0))) - set(self.taken)
        kinds = len(self.network.servers.errors)
        faults = {
            f"ledger residual {self.ledger.counts().residual}": self.ledger.counts().residual,
            f"wrong groups were taken: {self.wrong[:10]}": self.wrong,
            "a group was taken twice": len(set(self.taken)) != len(self.taken),
            f"tickets never came: {sorted(missing)[:10]}": len(missing) > 2 * PER_STEP,  # more than may be on their way
            f"{kinds} kinds of errors: a peer's words became labels": kinds > MOST_KINDS,
        }
        return [fault for fault, is_there in faults.items() if is_there]

    def close(self) -> None:
        self.network.stop("the fuzzing is over")
        self.publication.close()
        self.journal.close()

    def journal_problems(self) -> list[str]:
        """Check, after `close`, the journal as the next learner finds it. Opening it checks pages and sums."""
        with closing(Journal(self.journal_path)) as journal:
            state = journal.state()
            found = [
                f"the journal holds a wrong group of ticket {slot.ticket_id}"
                for slot in state.buffered
                if not content.is_right(journal.group(slot.ticket_id))
            ]
            if (state.last_step, state.counters.get("trained", 0)) != (self.version, len(self.taken)):
                found.append(f"the journal ends at step {state.last_step}, the learner at {self.version}")
            return found
