"""The saver: it decides when a checkpoint is due, and writes it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from asyncrl.config.schema import RunConfig
from learner.checkpoint.storage import save_checkpoint
from learner.reporting.reporter import Reporter
from learner.tickets.ledger import TicketLedger
from learner.training.trainer import Trainer
from protocol.codec import MIB

logger = logging.getLogger(__name__)

GIB = 1024 * MIB


@dataclass(frozen=True)
class Saver:
    """Writes checkpoints, and tells the journal which groups it may forget."""

    config: RunConfig
    training: Trainer
    ledger: TicketLedger
    reporter: Reporter
    run_id: str

    def is_due(self) -> bool:
        """True if a checkpoint is due after this step; False after the last, which always saves."""
        progress, settings = self.training.progress, self.config.trainer
        if progress.is_last:
            return False
        if settings.save_freq > 0 and progress.step % settings.save_freq == 0:
            return True
        if self.ledger.journal.needed_bytes <= settings.journal_limit_mib * MIB:
            return False
        logger.info("groups of over %d MiB await a checkpoint (trainer.journal_limit_mib)", settings.journal_limit_mib)
        return True

    def save(self) -> None:
        """Write a checkpoint. The journal is on disk before it, and keeps its groups until the checkpoint is."""
        self.reporter.finish_samples()
        self.ledger.flush_journal()
        training, keep = self.training, self.config.trainer.save_limit
        state = training.state(self.run_id)
        processor = training.processor.processor  # the model folder's own
        folder = save_checkpoint(self.config.run_path, training.engine, processor, state, keep, training.saved_roles)
        self.forget_groups()
        logger.info("checkpoint %s", folder)

    def forget_groups(self) -> None:
        """Forget groups that no restart needs, beyond trainer.keep_samples_gib."""
        keep_bytes = int(self.config.trainer.keep_samples_gib * GIB)
        last = self.config.last_step_not_needed(self.training.progress.step)
        first = self.ledger.forget_payloads(last, keep_bytes=keep_bytes)
        self.reporter.forget_tokens(first)
