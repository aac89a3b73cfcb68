"""The saver: it decides when a checkpoint is due, takes a snapshot, and has it written while training goes on.

One checkpoint is written at a time. Until it is complete a restart begins at the one before, and the journal keeps its
groups; the steps since are made again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.config.run_sections import TrainerConfig
from learner.loop.checkpoint import BackgroundWrite, make_building_folder, save_checkpoint
from learner.loop.trainer import Trainer
from learner.reporting.reporter import Reporter
from learner.tickets.ledger import TicketLedger
from protocol.codec import MIB

logger = logging.getLogger(__name__)

GIB = 1024 * MIB
PARTING_S = 10.0
"""How long a run that fails or is interrupted waits for the checkpoint that is being written. Its servers, and a
launcher that ends it, wait a little longer."""


@dataclass
class Saver:
    """Has checkpoints written, and tells the journal which groups it may forget. Used by the main thread."""

    run_path: Path
    trainer: TrainerConfig
    last_step_not_needed: Callable[[int], int]
    """Last step whose groups a restart from the checkpoint of a step does not read."""
    training: Trainer
    ledger: TicketLedger
    reporter: Reporter
    run_id: str
    wait: Callable[[Callable[[], bool], int], None]
    """Blocks until the checkpoint of that step is written, with a deadline."""
    saved_step: int
    """Step of the newest checkpoint that is complete, or is being written; 0 for none."""
    _writing: BackgroundWrite | None = None
    _writing_bytes: int = 0
    """Groups that the journal may forget when that is complete, about."""
    _seconds: dict[str, float] = field(default_factory=dict)

    def is_due(self) -> bool:
        """True if a checkpoint is due after this step; False after the last, which always saves."""
        progress, settings = self.training.progress, self.trainer
        if progress.is_last:
            return False
        if settings.save_freq > 0 and progress.step % settings.save_freq == 0:
            return True
        if self.ledger.journal.needed_bytes - self._writing_bytes <= settings.journal_limit_mib * MIB:
            return False
        logger.info("groups of over %d MiB await a checkpoint (trainer.journal_limit_mib)", settings.journal_limit_mib)
        return True

    def save(self) -> None:
        """Take a snapshot, once the last checkpoint is written, and begin to write it. There is nothing to do where
        this step has a checkpoint.

        The journal is on disk before the checkpoint, and keeps its groups until that is complete.
        """
        step = self.training.progress.step
        if step and step == self.saved_step:
            return
        began = time.monotonic()
        self.finish()
        self.reporter.finish_samples()
        self.ledger.flush_journal()
        run_path, keep, copies = self.run_path, self.trainer.save_limit, self.trainer.save_async
        building = make_building_folder(run_path, step)
        snapshot = self.training.snapshot(self.run_id, building, copies=copies)
        self.saved_step, self._writing_bytes = step, self.ledger.journal.needed_bytes
        self._writing = BackgroundWrite(lambda: save_checkpoint(run_path, building, snapshot, keep), ended=self._wake)
        if not copies:
            self.finish()
        self._add("checkpoint/blocked_s", time.monotonic() - began)

    def _wake(self) -> None:
        """End a wait of the main thread for this checkpoint."""
        with self.ledger.changed:
            self.ledger.changed.notify_all()

    def settle(self) -> None:
        """If a checkpoint has been written, forget the groups that it holds. Raises what kept it from being written."""
        writing = self._writing
        if writing is None or not writing.is_done:
            return
        self._writing, self._writing_bytes = None, 0
        writing.check()
        self._add("checkpoint/write_s", writing.seconds)
        logger.info("checkpoint of step %d: written in %.1f s", self.saved_step, writing.seconds)
        self.forget_groups()

    def has_written(self, step: int) -> bool:
        """True if a complete checkpoint holds this step."""
        return step <= self.saved_step and (self._writing is None or self._writing.is_done)

    def finish(self) -> None:
        """Wait until no checkpoint is being written. Raises what kept one from being written."""
        writing = self._writing
        if writing is not None and not writing.is_done:
            self.wait(lambda: writing.is_done, self.saved_step)
        self.settle()

    def close(self, *, waits: bool = True) -> None:
        """Give a checkpoint that is being written the time to become complete, where the run ends without it."""
        writing = self._writing
        if writing is None or not waits:
            return
        try:
            writing.wait(PARTING_S)
            logger.info("checkpoint of step %d: written", self.saved_step)
        except Exception as problem:
            logger.error("the checkpoint of step %d was not written: %s", self.saved_step, problem)

    def forget_groups(self) -> None:
        """Forget groups that no restart needs, beyond trainer.keep_samples_gib."""
        keep_bytes = int(self.trainer.keep_samples_gib * GIB)
        last = self.last_step_not_needed(self.saved_step)
        first = self.ledger.forget_payloads(last, keep_bytes=keep_bytes)
        self.reporter.forget_tokens(first)

    def report(self) -> dict[str, float]:
        """Seconds since the last report: in which the learner stood still for a checkpoint, and of writing one."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
