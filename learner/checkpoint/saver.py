"""When a checkpoint is due, and what goes into it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from asyncrl.config.schema import RunConfig
from asyncrl.journal.writer import Journal
from learner.checkpoint.format import LearnerState, save_checkpoint
from learner.reporting.reporter import Reporter
from learner.tickets.ledger import TicketLedger
from learner.training.engines.base import TrainEngine
from learner.training.trainer import Progress
from protocol.codec import MIB

logger = logging.getLogger(__name__)

GIB = 1024 * MIB


class Saver:
    def __init__(
        self,
        config: RunConfig,
        engine: TrainEngine,
        processor: Any,
        ledger: TicketLedger,
        journal: Journal,
        reporter: Reporter,
        *,
        run_id: str,
        architecture: str,
        base: str,
    ):
        """`processor` is the model folder's own; `base` the fingerprint of the weights below an adapter, or empty."""
        self._config = config
        self._engine = engine
        self._processor = processor
        self._ledger = ledger
        self._journal = journal
        self._reporter = reporter
        self._run_id = run_id
        self._architecture = architecture
        self._base = base

    def is_due(self, progress: Progress) -> bool:
        """Not after the last step, whose checkpoint is written in any case."""
        every = self._config.trainer.save_freq
        return not progress.is_last and ((every > 0 and progress.step % every == 0) or self._journal_is_full())

    def _journal_is_full(self) -> bool:
        limit = self._config.trainer.journal_limit_mib
        if self._journal.needed_bytes <= limit * MIB:
            return False
        logger.info("groups of over %d MiB await a checkpoint (trainer.journal_limit_mib): writing one", limit)
        return True

    def save(self, progress: Progress, controllers: Mapping[str, dict[str, int]]) -> None:
        """The journal is on disk before a checkpoint relies on it, and keeps its groups until the checkpoint is."""
        adapter = self._engine.adapter
        state = LearnerState(
            step=progress.step,
            version=progress.version,
            architecture=self._architecture,
            run_id=self._run_id,
            adapter=adapter.model_dump(mode="json") if adapter else None,
            base=self._base,
            controllers=dict(controllers),
        )
        self._reporter.finish_samples()
        self._ledger.flush_journal()
        folder = save_checkpoint(
            self._config.run_path, self._engine, self._processor, state, self._config.trainer.save_limit
        )
        self.forget_groups(progress.step)
        logger.info("checkpoint %s", folder)

    def forget_groups(self, step: int) -> None:
        """A checkpoint holds the steps up to this one: of their groups, those within trainer.keep_samples_gib stay."""
        keep_bytes = int(self._config.trainer.keep_samples_gib * GIB)
        first = self._ledger.forget_payloads(step, keep_bytes=keep_bytes)
        self._reporter.forget_tokens(first)
