"""The learner service: prepare, repeat the steps that the journal holds, then receive - step - publish until done."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import chain

from asyncrl.config.explain import method_line, schedule_notes
from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig, changed
from asyncrl.config.secrets import secret_notes
from asyncrl.devices.device import check_device_channel, max_logprob_difference
from asyncrl.errors import BadStateError, UserError
from asyncrl.journal.run_inputs import recorded_updates, scoring_fingerprints
from asyncrl.processing.processor import prompt_processor
from asyncrl.run_folder.contents import EXPORT_FOLDER, save_config
from asyncrl.run_folder.failure import kind_of
from asyncrl.run_folder.lock import LearnerLock
from asyncrl.telemetry.jsonl import write_atomically
from asyncrl.telemetry.recorder import RunRecorder, is_finished
from asyncrl.telemetry.timeline import LEARNER
from asyncrl.telemetry.tracker import TrackedRun, open_trackers
from learner.groups.ticket import ReceivedGroup
from learner.loop.clean_stop import INTERRUPTED, CleanStop, StopAsked
from learner.loop.logprob_parity import ParityJudge
from learner.loop.policy_export import finish_export
from learner.loop.resume import (
    ROW_DIGESTS,
    StartingPoint,
    adapter_settings,
    check_input_changes,
    check_lasting,
    check_steps_ahead,
    find_start,
    forget_run,
    input_settings,
    lasting_settings,
    open_journal,
    scoring_changes,
    settle_day,
    sign_journal,
    update_settings,
)
from learner.loop.saver import Saver
from learner.loop.step_schedule import StepSchedule
from learner.loop.trainer import Trainer
from learner.network.device_lease import LearnerLease, take_first_lease
from learner.network.publication import open_device_sender, open_publication, publish, source_opener
from learner.network.servers import ModelFacts
from learner.network.thread import NetworkThread
from learner.ranks.group import ALONE, Ranks
from learner.ranks.processes import leading, telling_given_ranks
from learner.ranks.rank_variables import rank_variables
from learner.reporting.exporter import open_exporter
from learner.reporting.reporter import Reporter
from learner.tickets.group_judge import make_judge
from learner.tickets.ledger import TicketLedger
from learner.tickets.replay_buffer import make_replay_buffer
from learner.tickets.ticket_deadline import TicketDeadline
from learner.tickets.ticket_writer import TicketWriter
from learner.training.prompts_ahead import PromptsAhead
from learner.training.step import NotFiniteError
from protocol.device_lock import DeviceLease
from protocol.faults import crash_point

logger = logging.getLogger(__name__)

COULD_NOT_START = "the learner could not start"
FINISHED = "the run is finished"
FEW_STEPS = 3
"""Steps that may be made again after a restart without a checkpoint behind them."""
RECONNECTION_S = 4.0
"""Time after which, plus a heartbeat, servers have reconnected to a restarted learner with what they still hold."""


class Learner:
    def __init__(
        self, config: RunConfig, *, resume: bool = False, unattended: bool = False, accept_changes: bool = False
    ):
        """`accept_changes`: a resumed run takes rows and rewards as they are now."""
        self.config = config
        self.stop = CleanStop(config.trainer.stop_grace_s)
        self._goodbye: str | None = COULD_NOT_START
        environment = rank_variables(config.learner, config.trainer.mode)
        with ExitStack() as self._resources:
            given = self._resources.enter_context(telling_given_ranks(environment, config.learner.wait_timeout_s))
            check_device_channel(config.rollout, "learner.device", config.learner.device)
            self._held = self._resources.enter_context(LearnerLock(config.run_path, unattended=unattended))
            start = find_start(config, resume=resume, resources=self._resources, accept_changes=accept_changes)
            self._accepts_changes = accept_changes
            self._was_finished = is_finished(config.run_path)
            self.processor = prompt_processor(config.model, config.environment)
            self.config = config = changed(config, settle_day(config.model, self.processor, start.journal))
            self._lease = self._take_lease(start)
            divided = config.learner.is_divided
            self._leader = (
                self._resources.enter_context(leading(config.learner, config.network, environment, given))
                if divided
                else None
            )
            self._prepare(config.with_policy(start.model_path), start)
            self._open(start)
            self._resources = self._resources.pop_all()
        self._goodbye = None

    def _take_lease(self, start: StartingPoint) -> DeviceLease | None:
        """Take the lease of a shared device before anything is on it."""
        if self.config.trainer.mode != "sync":
            return None
        lease = take_first_lease(
            self.config.run_path,
            timeout_s=self.config.network.timeout_s,
            wait_timeout_s=self.config.learner.wait_timeout_s,
        )
        if start.journal is None:
            self._resources.callback(lambda: lease.forget() if self._goodbye == COULD_NOT_START else None)
        return lease

    def _prepare(self, config: RunConfig, start: StartingPoint) -> None:
        """Load the data and the model, which may be wrong, before anything is written or any socket is bound."""
        self.writer = TicketWriter(config.ticket_settings, self.processor, self.processor.ends.stop_token_ids)
        self._inputs = input_settings(self.writer, config.reward)
        survey = self.writer.train_survey
        self._inputs_changed = check_input_changes(
            start, self._inputs, accept=self._accepts_changes, name_rows=survey.changed_since
        )
        self._lasting = lasting_settings(config, self.writer, self.processor)
        check_lasting(start.journal, self._lasting)
        check_steps_ahead(start, config.trainer, config.total_steps(self.writer.num_train_rows))
        self.parity_tickets = self.writer.write_parity()
        self.ranks = self._gather_ranks(start)
        self.training = Trainer(
            config, self.processor, self.writer.num_train_rows, start.checkpoint, start.state, self.ranks
        )
        self.training.step.budget.keep_in_run(config.run_path, config.batch, config.learner)
        self.progress, self.engine = self.training.progress, self.training.engine
        self.flops = self.engine.facts.flops

    def _gather_ranks(self, start: StartingPoint) -> Ranks:
        """Join the other ranks, if there are any: they load the same model as this one, at the same time."""
        if self._leader is None:
            return ALONE
        return self._leader.begin(
            state=asdict(start.state) if start.state else None,
            checkpoint=str(start.checkpoint or ""),
            model_path=str(start.model_path or ""),
            num_rows=self.writer.num_train_rows,
            template_date=self.config.model.template_date,
        )

    def _open(self, start: StartingPoint) -> None:
        """Open journal, shared memory, sockets and metrics endpoint: all of them, or none where one cannot be had."""
        config = self.config
        if start.journal is None:
            self._resources.callback(lambda: forget_run(config.run_path) if self._goodbye == COULD_NOT_START else None)
        self.journal = start.journal or open_journal(config.run_path, config.trainer.durability, self._resources)
        self.exporter = open_exporter(config.telemetry, run=str(config.run_path))
        self._resources.callback(self.exporter.close)  # the last but the journal: a scrape is to see how a run ended
        self.run_id = sign_journal(
            start,
            self.journal,
            {**self._lasting, **adapter_settings(self.engine.adapter, self.training.base)},
            update_settings(config),
            self._inputs,
            self.engine.published_state(),
        )
        self.ledger = TicketLedger(
            self.journal,
            prompts_per_step=config.batch.prompts_per_step,
            bound=self.training.bound,
            total_groups=self.progress.total_steps * config.batch.prompts_per_step,
            on_stale=config.learner.on_stale,
            deadline=TicketDeadline(
                least_s=config.network.timeout_s,  # a server that has gone is given up after that
                unmeasured_s=config.learner.wait_timeout_s / 2,  # another one then has as long before the run stops
            ),
            judge=make_judge(
                config.algorithm,
                self.writer.order(),
                prompts_per_step=config.batch.prompts_per_step,
                total_steps=self.progress.total_steps,
                has_end=not config.trainer.max_steps,
                seed=config.trainer.seed,
                accuracy=config.reward.accuracy_component,
            ),
            replay=make_replay_buffer(config.algorithm, config.trainer.seed),
        )
        withhold_s = config.network.heartbeat_s + RECONNECTION_S
        self.ledger.recover(self.writer.write, withhold_s=withhold_s, drop_changed=self._accepts_changes)
        self.ledger.advance(self.progress.version)
        self._resources.enter_context(closing(PromptsAhead(self.ledger, self.processor)))
        self.publication = self._resources.enter_context(open_publication(self.run_id))
        self.device_sender = (
            open_device_sender(
                config.rollout, config.network, self.publication, self.engine, first_s=config.first_meeting_s
            )
            if config.sends_device_versions
            else None
        )
        if self.device_sender:
            self._resources.callback(self.device_sender.close)
        self.network = NetworkThread(
            config.network_settings,
            self.run_id,
            ledger=self.ledger,
            write_ticket=self.writer.write,
            publication=self.publication,
            facts=ModelFacts(
                self.training.architecture,
                self.processor.fingerprint,
                self.engine.facts.vocabulary,
                self.training.base,
                scoring_fingerprints(self._inputs),
                config.model.template_date,
            ),
            version=max(self.progress.version, self.ledger.last_step),
            parity_tickets=self.parity_tickets,
            device_sender=self.device_sender,
            open_sources=source_opener(config.rollout),
            check_run=self._check_run,
        )
        self._resources.callback(lambda: self.network.stop(self._goodbye, run_is_finished=self._goodbye == FINISHED))
        self._connect_parts()
        if start.journal:
            self.reporter.truncate_after(self.progress.step, made_again=self.ledger.last_step)
            self.saver.forget_groups()  # if the last process died after its checkpoint

    def _connect_parts(self) -> None:
        """Create the parts of the main thread, which use what has been opened."""
        config, network, total_steps = self.config, self.network, self.progress.total_steps
        tracked = TrackedRun(config.run_path, config.model_dump(mode="json"))
        recorder = RunRecorder(config.run_path, open_trackers(config.telemetry, tracked, network.servers.errors))
        self.reporter = Reporter(
            recorder,
            network,
            self.ledger,
            self.processor,
            self.exporter,
            total_steps,
            trainer=config.trainer,
            accuracy=config.reward.accuracy_component,
            group_size=config.evaluation.group_size,
            has_turns=config.environment.is_used,
        )
        self._resources.callback(self.reporter.close)
        self.judge = ParityJudge(
            config.algorithm,
            config.rollout,
            config.alignment,
            max_logprob_difference(config.model, config.learner, config.rollout, config.alignment),
            self.training.config.batch.microbatch_tokens,
            network.parity,
            network.call_soon,
            self.engine,
            self.processor,
            self.reporter,
            self.ranks,
        )
        device = LearnerLease(
            config.learner.wait_timeout_s, self._lease, self.engine, network.lease, network.call_soon, network.timeline
        )
        self.device = device
        self.schedule = StepSchedule(
            config.schedule_settings,
            self.progress,
            network,
            self.ledger,
            device,
            self.judge,
            self.writer,
            self.reporter,
            self._status,
        )
        self.exporter.watch(
            network,
            self.ledger,
            self.schedule.waits,
            device=self.engine.device,
            is_asleep=lambda: device.is_lent,
            run_path=config.run_path,
            step=self.progress.step,
            total_steps=total_steps,
        )
        saved_step = self.progress.step  # that of the checkpoint; 0 without one
        self.saver = Saver(
            config.run_path,
            config.trainer,
            config.last_step_not_needed,
            self.training,
            self.ledger,
            self.reporter,
            self.run_id,
            self.schedule.wait_for_checkpoint,
            saved_step=saved_step,
        )
        self._resources.callback(lambda: self.saver.close(waits=not self.stop.hurries))

    def run(self) -> None:
        """Train to the last step and export, or to the step in which a signal comes.

        Says goodbye to the servers unless this is a crash: then they wait for the learner that comes next.
        """
        with self.stop.listening(), self._resources:
            try:
                self._train()
            except KeyboardInterrupt as interruption:
                if gone := self._gone_rank():
                    self._fail(gone)
                    raise gone from interruption
                self.stop.tell_loss(self.saver, self.progress.step)
                self._end("interrupted", "interrupted", INTERRUPTED)
                raise
            except Exception as error:
                reason = self._leader.reason_of(error) if self._leader else error
                self._fail(reason)
                if reason is error:
                    raise
                raise reason from error

    def _train(self) -> None:
        try:
            self._begin()
            while not self.progress.is_last:
                self._one_step()
        except StopAsked:
            if not self._gone_rank():
                self.stop.save(self.saver, self.schedule, self.network, self.device)
            raise
        self.schedule.take_device_back()
        self._save(is_last=True)
        self._export()
        self._end("finished", "finished", FINISHED)

    def _gone_rank(self) -> Exception | None:
        """Cause of another rank's end: torchrun interrupts the others for it."""
        return self._leader.processes.find_gone() if self._leader else None

    def _check_run(self) -> None:
        """Raise what has ended another rank, or StopAsked."""
        if self._leader:
            self._leader.processes.check()
        self.stop.check()

    def _begin(self) -> None:
        """Start the network thread, repeat journaled steps, and publish the first weights."""
        self._held.accept()
        logger.info("method: %s", method_line(self.config.algorithm))
        config, steps = self.config, self.progress.total_steps
        for note in chain(secret_notes(config.environment, config.reward), schedule_notes(config, steps)):
            logger.warning("%s", note)
        save_config(self.config.run_path, dump_config(self.config))
        write_atomically(config.run_path / ROW_DIGESTS, self.writer.train_survey.digests(), durable=False)
        self.reporter.started(self.progress.step, self.engine.device)
        self.reporter.rows(self.writer.bad_rows, held_out_trained=self.writer.num_held_out_trained)
        changed_after = [change.after_step for change in recorded_updates(self.journal, "inputs")[1:]]
        self.reporter.inputs(self._inputs_changed, scoring_changes=scoring_changes(self.journal), after=changed_after)
        self._status("starting")
        self.network.start()
        if self._make_steps_again() > FEW_STEPS and not self.progress.is_last:
            self._save()  # else another end before the next checkpoint would make them all once more
        self.schedule.end_with_the_data()
        if self._was_finished and not self.schedule.needs_server:
            logger.info("step %d was the last: nothing is left to do for a server", self.progress.step)
        else:  # also at the last step of a learner that died: its servers are to hear that the run is finished
            self.schedule.wait_for_server()
            self._publish()  # version 0, too: a server may have loaded another folder of the same architecture
            self.schedule.open_for_work()

    # --- steps ------------------------------------------------------------------------------------

    def _make_steps_again(self) -> int:
        """Repeat the steps after the newest checkpoint whose groups the journal holds: they give the same weights.
        Returns their number."""
        first, last = self.progress.step + 1, self.ledger.last_step
        if first > last:
            return 0
        logger.info("making steps %d to %d again, from the journal", first, last)
        while self.progress.step < last:
            self.network.check()
            if self.schedule.is_evaluation_due:
                self.schedule.wait_for_server()
                self._publish()
                self.schedule.evaluate_again()
                self.schedule.take_device_back()
            self._status("catching up", f"step {self.progress.step + 1} of {last} from the journal")
            started = time.monotonic()
            step, drop_changed = self.progress.step + 1, self._accepts_changes
            groups = self.ledger.take_again(step, self.writer.write, drop_changed=drop_changed)
            self._learn(groups, started, publish=False)
        return last - first + 1

    def _one_step(self) -> None:
        """Receive, learn, publish, let new tickets out, report."""
        started = time.monotonic()
        self.stop.check()
        self.saver.settle()
        held_up_s = self.schedule.wait_for_batch()
        if self.ledger.is_over:  # what was still awaited has been dropped
            self.schedule.end_with_the_data()
            self.schedule.open_for_work()
            self.schedule.finish_evaluation()  # one that has begun when this was not known to be the last step
            return
        self._status("training")
        self._learn(self.ledger.take(), started + held_up_s, publish=True)
        if self.device.is_shared:
            self._save_if_due()  # while it is ours
            self.schedule.open_for_work()
        else:
            self.schedule.open_for_work()
            self._save_if_due()

    def _save_if_due(self) -> None:
        if self.saver.is_due():
            self.schedule.finish_evaluation(before_step=self.progress.step)
            self._save()

    def _learn(self, groups: Sequence[ReceivedGroup], started: float, *, publish: bool) -> None:
        version = self.progress.version
        waited = time.monotonic()
        try:
            batch, values = self.training.learn(groups)
        except NotFiniteError as error:
            self.exporter.not_finite(error.number)
            raise
        learned = time.monotonic()
        crash_point("step.trained")
        self.ledger.bound = self.training.bound
        self.ledger.advance(self.progress.version)
        self.schedule.end_with_the_data()
        published_bytes = 0
        if publish:
            published_bytes = self._publish()
            self.schedule.admit_unless_evaluating()
        published = time.monotonic()
        step_s = published - started
        values |= {
            "step_s": step_s,
            "wait_s": waited - started,
            "learn_s": learned - waited,
            "model_flops_per_s": self.flops.of(batch.train_groups) / (learned - waited),
            "publish_s": published - learned,
            "publish_bytes": float(published_bytes),
            "idle/learner": (waited - started) / step_s,
            "tokens_per_s/learner": values["tokens"] / step_s,
            **self.device.report(),
            **self.saver.report(),
        }
        self.reporter.step(self.progress.step, version, values, batch, self.training.step.trained)
        self.judge.watch(self.progress.step, values)
        self._status("training" if publish else "catching up")

    def _publish(self) -> int:
        """Publish the weights, and return the bytes of the version."""
        manifest = publish(self.publication, self.engine, self.progress.version, self.device_sender)
        self.network.call_soon(self.network.servers.announce, manifest)
        self.exporter.published(manifest)
        return manifest.total_bytes

    def _save(self, *, is_last: bool = False) -> None:
        """Begin to write a checkpoint. The last one is waited for."""
        with self.network.timeline.doing(LEARNER, "saving"):
            self.saver.save()
            if is_last:
                self.saver.finish()

    def _export(self) -> None:
        """Write the end product, and say how far it is from the policy that was sampled."""
        folder, config = self.config.run_path / EXPORT_FOLDER, self.config
        self.engine.export(self.processor.processor, folder)
        record = finish_export(
            config.model, config.rollout.quantization, self.processor, self.writer.some_prompts, folder
        )
        logger.log(logging.WARNING if record.differs else logging.INFO, "finished: %s is %s", folder, record.describe())

    # --- the end and the status -----------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        self._held.save(error)
        kind, why, goodbye = kind_of(error), str(error), "the learner failed"
        if not isinstance(error, BadStateError | UserError):
            why = f"{type(error).__name__}: {error}"
            goodbye = "the learner's disk is full" if kind else None  # after a crash servers wait for the next learner
        self._end("failed", kind or "crash", goodbye, why)

    def _end(self, phase: str, kind: str, goodbye: str | None, why: str = "") -> None:
        """Record the end of the run. A full disk must not hide the reason."""
        self._goodbye = goodbye
        self.exporter.stopped(kind)
        try:
            self._status(phase, why)
        except OSError as problem:
            logger.error("status.json could not be written: %s", problem)

    def _status(self, phase: str, waiting_for: str = "") -> None:
        self.reporter.status(phase, self.progress.step, self.progress.version, waiting_for)
