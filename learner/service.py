"""The life of a learner: prepare, then receive - step - publish until done, then export."""

from __future__ import annotations

import logging
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.schema import RunConfig
from asyncrl.models.export import export_model
from asyncrl.models.loading import architecture_fingerprint, stop_token_ids
from asyncrl.models.processing import PromptProcessor
from learner.batch import Batch, describe_batch, make_batch
from learner.checkpoint import (
    LearnerState,
    check_settings,
    newest_checkpoint,
    read_state,
    restore_engine,
    save_checkpoint,
)
from learner.engines import create_engine
from learner.exchange import Exchange, ModelFacts, wait_for
from learner.publication import open_publication, publish
from learner.reporting import Reporter
from learner.step import LearnerStep
from learner.ticket_writer import TicketWriter
from learner.tickets import TicketLedger

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """Where the run is. One step publishes one version, so the two run in parallel from their starts."""

    step: int = 0
    version: int = 0


class Learner:
    def __init__(self, config: RunConfig, *, resume: bool = False):
        self.config = config
        self.progress = Progress()
        checkpoint = newest_checkpoint(config.run_path) if resume else None
        model = config.model.model_copy(update={"path": str(checkpoint / "model")}) if checkpoint else config.model
        self.processor = PromptProcessor(config.model)
        self.total_steps = 0
        self._prepare(config.model_copy(update={"model": model}), checkpoint)

    def _prepare(self, config: RunConfig, checkpoint: Path | None) -> None:
        """Load everything that can be wrong before anything is written or any socket is bound."""
        state = read_state(checkpoint) if checkpoint else None
        self.writer = TicketWriter(config, self.processor, stop_token_ids(config.model, self.processor.tokenizer))
        per_step = config.batch.prompts_per_step
        self.total_steps = config.total_steps(self.writer.num_train_rows)
        updates = self.total_steps * config.algorithm.updates_per_batch
        self.engine = create_engine(config, config.learner.optim, updates)
        self.engine.prepare()
        architecture = architecture_fingerprint(self.engine.unwrap_model())
        self.ledger = TicketLedger(
            prompts_per_step=per_step,
            max_staleness=config.largest_staleness,
            total_groups=self.total_steps * per_step,
        )
        if checkpoint and state:
            check_settings(checkpoint, state, self._settings())
            restore_engine(checkpoint, self.engine, state, architecture)
            self.ledger.restore(state.ledger)
            self.progress = Progress(state.step, state.version)
        self.architecture = architecture
        self.run_id = state.run_id if state else uuid.uuid4().hex[:12]
        self.step = LearnerStep(self.engine, config)
        self._open(architecture)
        if state:
            self.reporter.recorder.truncate_after(state.step)

    def _open(self, architecture: str) -> None:
        """Shared memory, sockets, metrics endpoint: all of them, or none where one cannot be had."""
        vocabulary = self.engine.unwrap_model().get_output_embeddings().weight.shape[0]
        with ExitStack() as undo:
            self.publication = undo.enter_context(open_publication(self.run_id))
            self.exchange = Exchange(
                self.config,
                self.run_id,
                ledger=self.ledger,
                processor=self.processor,
                publication=self.publication,
                facts=ModelFacts(architecture, self.processor.fingerprint, vocabulary),
                version=self.progress.version,
            )
            undo.callback(self.exchange.stop, "the learner could not start")
            self.reporter = Reporter(self.config, self.exchange, self.ledger, self.processor, self.total_steps)
            undo.pop_all()

    def run(self) -> None:
        """Train to the last step and export. Says goodbye to the servers however it ends."""
        reason = "the learner failed"
        try:
            self.exchange.start()
            self._wait_for_server()
            self._publish()  # version 0, too: a server may have loaded another folder of the same architecture
            if self.config.evaluation.before_training and self.progress.step == 0:
                self._evaluate()
            self._issue_tickets()
            while self.progress.step < self.total_steps:
                self._one_step()
            if self.config.evaluation.every_steps == 0 or self.total_steps % self.config.evaluation.every_steps:
                self._evaluate()
            self._save()
            export_model(self.engine.unwrap_model(), self.processor.processor, self.config.run_path / "export")
            logger.info("finished: the model is in %s", self.config.run_path / "export")
            reason = "the run is finished"
            self._status("finished")
        except KeyboardInterrupt:
            reason = "the learner was interrupted"
            self._status("interrupted")
            raise
        except Exception as error:
            self._status("failed", str(error))
            raise
        finally:
            self.exchange.stop(reason)
            self.publication.close()
            self.reporter.close()

    def _one_step(self) -> None:
        """Receive, learn, publish, let new tickets out, report."""
        started = time.monotonic()
        version = self.progress.version
        batch = self._next_batch()
        waited = time.monotonic()
        values = describe_batch(batch, version, self.config.reward.accuracy_component) | self.step(batch, version)
        learned = time.monotonic()
        self.progress.step += 1
        self.progress.version += 1
        self._publish()
        self._issue_tickets()
        published = time.monotonic()
        step_s = published - started
        values |= {
            "step_s": step_s,
            "wait_s": waited - started,
            "learn_s": learned - waited,
            "publish_s": published - learned,
            "idle/learner": (waited - started) / step_s,
            "tokens_per_s/learner": values["tokens"] / step_s,
        }
        self.reporter.step(self.progress.step, version, values, batch)
        self._status("training")
        self._after_step()

    def _after_step(self) -> None:
        step, every, save = self.progress.step, self.config.evaluation.every_steps, self.config.trainer.save_freq
        if every and step % every == 0:
            self._evaluate()
        if save and step % save == 0 and step < self.total_steps:
            self._save()

    def _next_batch(self) -> Batch:
        version = self.progress.version
        wait_for(
            self.exchange,
            self.ledger,
            lambda: self.ledger.ready(version),
            timeout_s=self.config.learner.wait_timeout_s,
            what=lambda: self._describe_wait(version),
            progress=lambda: self._status("training", self._describe_wait(version)),
        )
        return make_batch(self.ledger.take(version), self.processor)

    def _describe_wait(self, version: int) -> str:
        counts = self.ledger.counts()
        needed = self.config.batch.prompts_per_step
        text = f"groups of step {self.progress.step + 1} (needs {needed}, has {counts.buffered})"
        blockers = self.ledger.blockers(version)
        if not self.exchange.servers:
            return f"{text}; no rollout server is connected"
        if blockers:
            ticket_id, server_id, age_s = blockers[0]
            text += f"; oldest: ticket {ticket_id}, {age_s:.0f} s, held by {server_id or 'no server'}"
        return text

    def _wait_for_server(self) -> None:
        self._status("waiting", "the first rollout server")
        wait_for(
            self.exchange,
            self.ledger,
            lambda: bool(self.exchange.servers),
            timeout_s=self.config.network.start_timeout_s,
            what=lambda: f"a rollout server at {self.config.control_endpoint} (network.start_timeout_s)",
        )

    def _publish(self) -> None:
        manifest = publish(self.publication, self.engine, self.progress.version)
        self.exchange.announce(manifest)
        self.reporter.published(manifest)

    def _issue_tickets(self) -> None:
        version = self.progress.version
        self.exchange.dispatch(
            lambda: (self.writer.write(ticket_id, version) for ticket_id in self.ledger.admissible(version))
        )

    def _evaluate(self) -> None:
        """Score every held-out row with the current version; training waits, generation of tickets does not."""
        version, rows = self.progress.version, self.writer.num_held_out_rows
        if not rows:
            return
        self._status("evaluating", f"{rows} held-out rows")
        self.exchange.dispatch(lambda: (self.writer.write_evaluation(index, version) for index in range(rows)))
        wait_for(
            self.exchange,
            self.ledger,
            lambda: self.ledger.evaluation_arrived() == rows,
            timeout_s=self.config.learner.wait_timeout_s,
            what=lambda: f"held-out rows ({self.ledger.evaluation_arrived()} of {rows} have arrived)",
        )
        result = self.reporter.evaluated(self.progress.step, version, self.ledger.take_evaluation())
        logger.info(
            "step %d: held-out accuracy %.4f over %d rows (%d could not be scored)",
            self.progress.step,
            result["accuracy"],
            result["rows"],
            result["errors"],
        )

    def _settings(self) -> dict[str, int]:
        config = self.config
        return {
            "batch.prompts_per_step": config.batch.prompts_per_step,
            "batch.group_size": config.batch.group_size,
            "learner.max_staleness": config.largest_staleness,
            "trainer.seed": config.trainer.seed,
            "training rows": self.writer.num_train_rows,
        }

    def _save(self) -> None:
        state = LearnerState(
            step=self.progress.step,
            version=self.progress.version,
            architecture=self.architecture,
            ledger=self.ledger.state(),
            run_id=self.run_id,
            settings=self._settings(),
        )
        folder = save_checkpoint(
            self.config.run_path, self.engine, self.processor.processor, state, self.config.trainer.save_limit
        )
        logger.info("checkpoint %s", folder)

    def _status(self, phase: str, waiting_for: str = "") -> None:
        self.reporter.status(phase, self.progress.step, self.progress.version, waiting_for)
