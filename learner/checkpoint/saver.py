"""The saver: it decides when a checkpoint is due, and writes it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.config.schema import RunConfig
from learner.checkpoint.format import LearnerState, save_checkpoint
from learner.reporting.reporter import Reporter
from learner.tickets.ledger import TicketLedger
from learner.training.engines.base import TrainEngine
from learner.training.trainer import Progress
from protocol.codec import MIB

logger = logging.getLogger(__name__)

GIB = 1024 * MIB


@dataclass(frozen=True)
class Saver:
    """Writes checkpoints, and tells the journal which groups it may forget."""

    config: RunConfig
    engine: TrainEngine
    processor: Any
    """The model folder's own processor."""
    ledger: TicketLedger
    reporter: Reporter
    run_id: str
    architecture: str
    base: str
    """Fingerprint of the weights below an adapter, or empty."""

    def is_due(self, progress: Progress) -> bool:
        """Whether to save after this step; not after the last, whose checkpoint is written in any case."""
        every = self.config.trainer.save_freq
        return not progress.is_last and ((every > 0 and progress.step % every == 0) or self._journal_is_full())

    def _journal_is_full(self) -> bool:
        limit = self.config.trainer.journal_limit_mib
        if self.ledger.journal.needed_bytes <= limit * MIB:
            return False
        logger.info("groups of over %d MiB await a checkpoint (trainer.journal_limit_mib): writing one", limit)
        return True

    def save(self, progress: Progress, controllers: Mapping[str, dict[str, int]]) -> None:
        """Write a checkpoint. The journal is on disk before it, and keeps its groups until the checkpoint is."""
        adapter = self.engine.adapter
        state = LearnerState(
            step=progress.step,
            version=progress.version,
            architecture=self.architecture,
            run_id=self.run_id,
            adapter=adapter.model_dump(mode="json") if adapter else None,
            base=self.base,
            controllers=dict(controllers),
        )
        self.reporter.finish_samples()
        self.ledger.flush_journal()
        folder = save_checkpoint(
            self.config.run_path, self.engine, self.processor, state, self.config.trainer.save_limit
        )
        self.forget_groups(progress.step)
        logger.info("checkpoint %s", folder)

    def forget_groups(self, step: int) -> None:
        """Forget groups of the steps up to this one, which a checkpoint holds, beyond trainer.keep_samples_gib."""
        keep_bytes = int(self.config.trainer.keep_samples_gib * GIB)
        first = self.ledger.forget_payloads(step, keep_bytes=keep_bytes)
        self.reporter.forget_tokens(first)
