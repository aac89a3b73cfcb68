"""When a checkpoint is due, and what goes into it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from asyncrl.config.schema import RunConfig
from learner.checkpoint import LearnerState, save_checkpoint
from learner.engines.base import TrainEngine
from learner.journal import Journal
from learner.ledger import TicketLedger
from learner.progress import Progress
from protocol.codec import MIB

logger = logging.getLogger(__name__)


class Saver:
    def __init__(
        self,
        config: RunConfig,
        engine: TrainEngine,
        processor: Any,
        ledger: TicketLedger,
        journal: Journal,
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
        self._run_id = run_id
        self._architecture = architecture
        self._base = base

    def is_due(self, progress: Progress) -> bool:
        """Not after the last step, whose checkpoint is written in any case."""
        every = self._config.trainer.save_freq
        return not progress.is_last and ((every > 0 and progress.step % every == 0) or self._journal_is_full())

    def _journal_is_full(self) -> bool:
        limit = self._config.trainer.journal_limit_mib
        if self._journal.payload_bytes <= limit * MIB:
            return False
        logger.info("the journal's groups take over %d MiB (trainer.journal_limit_mib): writing a checkpoint", limit)
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
        self._ledger.flush_journal()
        folder = save_checkpoint(
            self._config.run_path, self._engine, self._processor, state, self._config.trainer.save_limit
        )
        self._ledger.forget_payloads(progress.step)
        logger.info("checkpoint %s", folder)
