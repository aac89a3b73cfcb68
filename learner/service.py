"""The life of a learner: prepare, make again what the journal holds, then receive - step - publish until done."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import nan

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError, UserError
from asyncrl.models.base_weights import base_fingerprint
from asyncrl.models.loading import architecture_fingerprint, stop_token_ids
from asyncrl.models.processing import PromptProcessor
from asyncrl.telemetry.failure import is_disk_full
from learner.adaptive_staleness import AdaptiveStaleness
from learner.batch import describe_batch, make_batch
from learner.checkpoint import LearnerState, check_adapter, restore_engine, save_checkpoint
from learner.connections import ModelFacts
from learner.device import DeviceTurns, first_turn
from learner.engines import create_engine
from learner.evaluation import Evaluation
from learner.exchange import Exchange
from learner.ledger import TicketLedger
from learner.parity import ParityJudge
from learner.publication import open_publication, publish
from learner.reporting import Reporter
from learner.start import (
    StartingPoint,
    adapter_settings,
    begin_journal,
    find_start,
    forget_lease,
    forget_run,
    sign_journal,
)
from learner.step import LearnerStep
from learner.ticket_writer import TicketWriter
from learner.tickets import ReceivedGroup
from learner.waiting import wait_for
from protocol.codec import MIB
from protocol.faults import crash_point
from protocol.lease import DeviceLease

logger = logging.getLogger(__name__)

COULD_NOT_START = "the learner could not start"
LONG_CATCH_UP_S = 60.0
"""Making steps again for longer than this ends in a checkpoint, whatever trainer.save_freq is."""
RECONNECTION_S = 4.0
"""After a restart of the learner, servers are back within this time and a heartbeat, with what they still hold."""


@dataclass
class Progress:
    """Where the run is. One step publishes one version, so the two run in parallel from their starts."""

    step: int = 0
    version: int = 0


class Learner:
    def __init__(self, config: RunConfig, *, resume: bool = False):
        self.config = config
        self.progress = Progress()
        self.total_steps = 0
        self._resources = ExitStack()
        self._goodbye: str | None = COULD_NOT_START
        try:
            start = find_start(config, resume=resume, resources=self._resources)
            path = str(start.model_path or config.model.path)
            self.processor = PromptProcessor(config.model)
            self._lease = self._take_lease(start)
            self._prepare(
                config.model_copy(update={"model": config.model.model_copy(update={"path": path})}),
                start,
            )
            self._open(start)
        except BaseException:
            self._resources.close()
            raise
        self._goodbye = None

    def _take_lease(self, start: StartingPoint) -> DeviceLease | None:
        """Where the device is shared, nothing is on it without the lease."""
        if self.config.trainer.mode != "sync":
            return None
        lease = first_turn(self.config)
        if start.journal is None:
            self._resources.callback(lambda: forget_lease(lease) if self._goodbye == COULD_NOT_START else None)
        return lease

    def _prepare(self, config: RunConfig, start: StartingPoint) -> None:
        """Load everything that can be wrong before anything is written or any socket is bound."""
        self.writer = TicketWriter(config, self.processor, stop_token_ids(config.model, self.processor.tokenizer))
        self.parity_tickets = self.writer.write_parity()
        self.total_steps = config.total_steps(self.writer.num_train_rows)
        updates = self.total_steps * config.algorithm.updates_per_batch
        self.engine = create_engine(config, config.learner.optim, updates)
        adapter = self.engine.adapter
        self.base = base_fingerprint(config.model) if adapter else ""
        if start.checkpoint and start.state:
            check_adapter(start.checkpoint, start.state, adapter, self.base)
        self.engine.prepare()
        self.architecture = architecture_fingerprint(self.engine.unwrap_model(), adapter)
        if start.checkpoint and start.state:
            restore_engine(start.checkpoint, self.engine, start.state, self.architecture)
            self.progress = Progress(start.state.step, start.state.version)
        self.step = LearnerStep(self.engine, config)
        self.adaptive = self._adaptive_staleness(start)

    def _adaptive_staleness(self, start: StartingPoint) -> AdaptiveStaleness | None:
        if self.config.learner.max_staleness != "auto":
            return None
        adaptive = AdaptiveStaleness(self.config.learner.adaptive_staleness)
        if start.state and "adaptive_staleness" in start.state.controllers:
            adaptive.restore(start.state.controllers["adaptive_staleness"])
        return adaptive

    def _open(self, start: StartingPoint) -> None:
        """Lock, journal, shared memory, sockets, metrics endpoint: all of them, or none where one cannot be had."""
        config = self.config
        self.journal = start.journal or begin_journal(config, self._resources)
        if start.journal is None:
            self._resources.callback(lambda: forget_run(self.journal) if self._goodbye == COULD_NOT_START else None)
        self.run_id = sign_journal(
            start,
            self.journal,
            self._settings() | adapter_settings(self.engine.adapter, self.base),
            self.engine.published_state(),
        )
        self.ledger = TicketLedger(
            self.journal,
            prompts_per_step=config.batch.prompts_per_step,
            bound=self.adaptive.bound if self.adaptive else config.largest_staleness,
            total_groups=self.total_steps * config.batch.prompts_per_step,
            on_stale=config.learner.on_stale,
        )
        self.ledger.recover(self.writer.write, withhold_s=config.network.heartbeat_s + RECONNECTION_S)
        self.ledger.advance(self.progress.version)
        self.publication = self._resources.enter_context(open_publication(self.run_id))
        vocabulary = self.engine.unwrap_model().get_output_embeddings().weight.shape[0]
        self.exchange = Exchange(
            config,
            self.run_id,
            ledger=self.ledger,
            write_ticket=self.writer.write,
            publication=self.publication,
            facts=ModelFacts(self.architecture, self.processor.fingerprint, vocabulary, self.base),
            version=max(self.progress.version, self.ledger.last_step),
            parity_tickets=self.parity_tickets,
        )
        self._resources.callback(lambda: self.exchange.stop(self._goodbye))
        self.turns = DeviceTurns(config, self._lease, self.engine, self.exchange) if self._lease else None
        self.reporter = Reporter(config, self.exchange, self.ledger, self.processor, self.total_steps)
        self._resources.callback(self.reporter.close)
        self.judge = ParityJudge(config, self.exchange, self.engine, self.processor, self.reporter)
        self.evaluation = Evaluation(config, self.exchange, self.ledger, self.writer, self.reporter)
        if start.journal:
            self.reporter.recorder.truncate_after(self.progress.step, evaluations_after=self.ledger.last_step)

    def run(self) -> None:
        """Train to the last step and export.

        Says goodbye to the servers unless this is a crash: then they wait for the learner that comes next.
        """
        try:
            self.exchange.start()
            self._make_steps_again()
            self._wait_for_server()
            self._publish()  # version 0, too: a server may have loaded another folder of the same architecture
            self._open_for_work()
            while self.progress.step < self.total_steps:
                self._one_step()
            self._take_device_back()
            self._save()
            self.engine.export(self.processor.processor, self.config.run_path / "export")
            logger.info("finished: the model is in %s", self.config.run_path / "export")
            self._goodbye = "the run is finished"
            self._status("finished")
        except KeyboardInterrupt:
            self._goodbye = "the learner was interrupted"
            self._last_status("interrupted")
            raise
        except (BadStateError, UserError) as error:
            self._goodbye = "the learner failed"
            self._last_status("failed", str(error))
            raise
        except Exception as error:
            if is_disk_full(error):  # ends the run like a bad state
                self._goodbye = "the learner's disk is full"
            self._last_status("failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            self._resources.close()

    # --- steps ------------------------------------------------------------------------------------

    def _make_steps_again(self) -> None:
        """Steps whose groups were taken after the newest checkpoint: the same groups, so the same weights."""
        first, last = self.progress.step + 1, self.ledger.last_step
        if first > last:
            return
        logger.info("making steps %d to %d again, from the journal", first, last)
        began = time.monotonic()
        while self.progress.step < last:
            self.exchange.check()
            self._status("catching up", f"step {self.progress.step + 1} of {last} from the journal")
            started = time.monotonic()
            groups = self.ledger.take_again(self.progress.step + 1, self.writer.write)
            self._learn(groups, started, publish=False)
        if time.monotonic() - began > LONG_CATCH_UP_S:
            self._save()  # not a second time

    def _one_step(self) -> None:
        """Receive, learn, publish, let new tickets out, report."""
        started = time.monotonic()
        self._wait_for_batch()
        self._learn(self.ledger.take(), started, publish=True)
        if self.turns is None:
            self._open_for_work()
            self._save_if_due()
        else:
            self._save_if_due()  # while the device is ours
            self._open_for_work()

    def _save_if_due(self) -> None:
        step, save = self.progress.step, self.config.trainer.save_freq
        if step < self.total_steps and ((save and step % save == 0) or self._journal_is_full()):
            self._save()

    def _learn(self, groups: Sequence[ReceivedGroup], started: float, *, publish: bool) -> None:
        version = self.progress.version
        waited = time.monotonic()
        batch = make_batch(groups, self.processor)
        values = describe_batch(batch, version, self.config.reward.accuracy_component) | self.step(batch, version)
        learned = time.monotonic()
        crash_point("step.trained")
        values |= self._adapt_staleness(values)
        self.progress.step += 1
        self.progress.version += 1
        self.ledger.advance(self.progress.version)
        published_bytes = 0
        if publish:
            published_bytes = self._publish()
            self._admit_unless_evaluating()
        published = time.monotonic()
        step_s = published - started
        values |= {
            "step_s": step_s,
            "wait_s": waited - started,
            "learn_s": learned - waited,
            "publish_s": published - learned,
            "publish_bytes": float(published_bytes),
            "idle/learner": (waited - started) / step_s,
            "tokens_per_s/learner": values["tokens"] / step_s,
            **(self.turns.report() if self.turns else {}),
        }
        self.reporter.step(self.progress.step, version, values, batch)
        self.judge.watch(self.progress.step, values)
        self._status("training" if publish else "catching up")

    def _adapt_staleness(self, values: Mapping[str, float]) -> dict[str, float]:
        """The bound of the tickets that are issued from now on."""
        if self.adaptive and self.adaptive.observe(values.get("ess", nan), values.get("mismatch_kl_k3", nan)):
            logger.info("max_staleness moves from %d to %d", self.ledger.bound, self.adaptive.bound)
            self.ledger.bound = self.adaptive.bound
        return {"staleness/bound": float(self.ledger.bound)}

    def _wait_for_batch(self) -> None:
        self._lend_device()
        wait_for(
            self.exchange,
            self.ledger,
            lambda: self.ledger.ready() and not self.exchange.alignment.holds_step,
            timeout_s=self.config.learner.wait_timeout_s,
            what=lambda: f"{self._describe_wait()} (learner.wait_timeout_s)",
            judge=self._judge,
            progress=lambda: self._status("training", self._describe_wait()),
        )
        self._take_device_back()

    def _judge(self) -> None:
        """Only between two steps: then the weights are those of the version."""
        if not self.exchange.alignment.has_complete:
            return
        self._take_device_back()
        self.judge.judge(self.progress.version)
        self._lend_device()

    def _describe_wait(self) -> str:
        counts = self.ledger.counts()
        needed = self.config.batch.prompts_per_step
        text = f"groups of step {self.progress.step + 1} (needs {needed}, has {counts.buffered})"
        blockers = self.ledger.blockers()
        if self.turns:
            text += f"; the device: {self.turns.who}"
        if not self.exchange.servers:
            return f"{text}; no rollout server is connected"
        held_by = self.exchange.alignment.holds_step
        if held_by:
            return f"{text}; the log-probs of {held_by} are being checked"
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

    def _publish(self) -> int:
        """Bytes of the version."""
        manifest = publish(self.publication, self.engine, self.progress.version)
        self.exchange.announce(manifest)
        self.reporter.published(manifest)
        return manifest.total_bytes

    # --- the device, where it is shared -------------------------------------------------------------

    def _lend_device(self) -> None:
        if self.turns:
            self.turns.lend()

    def _take_device_back(self) -> None:
        if self.turns:
            turns = self.turns
            turns.take_back(lambda: self._status("waiting", f"the device: {turns.who}"))

    # --- tickets and evaluation -------------------------------------------------------------------

    def _open_for_work(self) -> None:
        """Evaluate if it is time to, and let out the tickets of this version."""
        if self._evaluation_is_due():
            self._admit_unless_evaluating()
            self._status("evaluating", f"{self.writer.num_held_out_rows} held-out rows")
            self._lend_device()
            self.evaluation.run(self.progress.step, self.progress.version, self._judge)
        self.exchange.admit(self.progress.version)

    def _admit_unless_evaluating(self) -> None:
        """On-policy, an evaluation has the servers to itself: how tickets share a batch would depend on its timing."""
        if self.config.largest_staleness or not self._evaluation_is_due():
            self.exchange.admit(self.progress.version)

    def _evaluation_is_due(self) -> bool:
        return self.evaluation.is_due(self.progress.step, last=self.total_steps)

    # --- what stays ---------------------------------------------------------------------------------

    def _settings(self) -> dict[str, float | str]:
        """What may not change on resume: which ticket is which, and what the journal's log-probs are of."""
        config = self.config
        return {
            "batch.prompts_per_step": config.batch.prompts_per_step,
            "batch.group_size": config.batch.group_size,
            "learner.max_staleness": config.learner.max_staleness,
            "learner.on_stale": config.learner.on_stale,
            "trainer.seed": config.trainer.seed,
            **{f"rollout.{n}": getattr(config.rollout, n) for n in ("temperature", "top_p", "top_k", "min_p")},
            "data.shuffle": config.data.shuffle,
            "number of training rows": self.writer.num_train_rows,
            "fingerprint of the training rows": self.writer.data_fingerprint(),
            "fingerprint of processor and chat template": self.processor.fingerprint,
        }

    def _journal_is_full(self) -> bool:
        limit = self.config.trainer.journal_limit_mib
        if self.journal.payload_bytes <= limit * MIB:
            return False
        logger.info("the journal's groups take over %d MiB (trainer.journal_limit_mib): writing a checkpoint", limit)
        return True

    def _save(self) -> None:
        """The journal is on disk before a checkpoint relies on it, and keeps its groups until the checkpoint is."""
        state = LearnerState(
            step=self.progress.step,
            version=self.progress.version,
            architecture=self.architecture,
            run_id=self.run_id,
            adapter=self.engine.adapter.model_dump(mode="json") if self.engine.adapter else None,
            base=self.base,
            controllers={"adaptive_staleness": self.adaptive.state()} if self.adaptive else {},
        )
        self.ledger.flush_journal()
        folder = save_checkpoint(
            self.config.run_path, self.engine, self.processor.processor, state, self.config.trainer.save_limit
        )
        self.ledger.forget_payloads(self.progress.step)
        logger.info("checkpoint %s", folder)

    def _last_status(self, phase: str, why: str = "") -> None:
        """A disk without room must not take the place of the reason."""
        try:
            self._status(phase, why)
        except OSError as problem:
            logger.error("status.json could not be written: %s", problem)

    def _status(self, phase: str, waiting_for: str = "") -> None:
        self.reporter.status(phase, self.progress.step, self.progress.version, waiting_for)
