"""The learner's start: lock, data, model, journal and sockets are opened in order, and closed in the reverse order."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import asdict

from asyncrl.config.schema import RunConfig, changed
from asyncrl.devices.device import check_device_channel, max_logprob_difference
from asyncrl.journal.run_inputs import scoring_fingerprints
from asyncrl.processing.processor import prompt_processor
from asyncrl.run_folder.lock import LearnerLock
from asyncrl.telemetry.recorder import RunRecorder, is_finished
from asyncrl.telemetry.tracker import TrackedRun, open_trackers
from learner.loop.clean_stop import CleanStop
from learner.loop.logprob_parity import ParityJudge
from learner.loop.resume import (
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
    settle_day,
    sign_journal,
    update_settings,
)
from learner.loop.saver import Saver
from learner.loop.step_schedule import StepSchedule
from learner.loop.thread_choice import ThreadChoice
from learner.loop.trainer import Trainer
from learner.network.device_lease import LearnerLease, take_first_lease
from learner.network.publication import open_device_sender, open_publication, source_opener
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
from protocol.device_lock import DeviceLease

COULD_NOT_START = "the learner could not start"
FINISHED = "the run is finished"
RECONNECTION_S = 4.0
"""Time after which, plus a heartbeat, servers have reconnected to a restarted learner with what they still hold."""


class Learner:
    def __init__(
        self, config: RunConfig, *, resume: bool = False, unattended: bool = False, accept_changes: bool = False
    ):
        """`accept_changes`: a resumed run takes rows and rewards as they are now."""
        self.config = config
        self.stop = CleanStop(config.trainer.stop_grace_s)
        self.goodbye: str | None = COULD_NOT_START
        environment = rank_variables(config.learner, config.trainer.mode)
        with ExitStack() as self.resources:
            given = self.resources.enter_context(telling_given_ranks(environment, config.learner.wait_timeout_s))
            check_device_channel(config.rollout, "learner.device", config.learner.device)
            self.held = self.resources.enter_context(LearnerLock(config.run_path, unattended=unattended))
            start = find_start(config, resume=resume, resources=self.resources, accept_changes=accept_changes)
            self.accepts_changes = accept_changes
            self.was_finished = is_finished(config.run_path)
            self.processor = prompt_processor(config.model, config.environment, config.data.chat_template_kwargs)
            self.config = config = changed(config, settle_day(config.model, self.processor, start.journal))
            self._lease = self._take_lease(start)
            divided = config.learner.is_divided
            self.leader = (
                self.resources.enter_context(leading(config.learner, config.network, environment, given))
                if divided
                else None
            )
            self._prepare(config.with_policy(start.model_path), start)
            self._open(start)
            self.resources = self.resources.pop_all()
        self.goodbye = None

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
            self.resources.callback(lambda: lease.forget() if self.goodbye == COULD_NOT_START else None)
        return lease

    def _prepare(self, config: RunConfig, start: StartingPoint) -> None:
        """Load the data and the model, which may be wrong, before anything is written or any socket is bound."""
        self.writer = TicketWriter(config.ticket_settings, self.processor, self.processor.ends.stop_token_ids)
        self._inputs = input_settings(self.writer, config.reward)
        survey = self.writer.train_survey
        self.inputs_changed = check_input_changes(
            start, self._inputs, accept=self.accepts_changes, name_rows=survey.changed_since
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
        self.threads = ThreadChoice(
            config.run_path, config.learner, self.engine.device, is_shared=config.trainer.mode == "async"
        )
        self.flops = self.engine.facts.flops

    def _gather_ranks(self, start: StartingPoint) -> Ranks:
        """Join the other ranks, if there are any: they load the same model as this one, at the same time."""
        if self.leader is None:
            return ALONE
        return self.leader.begin(
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
            self.resources.callback(lambda: forget_run(config.run_path) if self.goodbye == COULD_NOT_START else None)
        self.journal = start.journal or open_journal(config.run_path, config.trainer.durability, self.resources)
        self.exporter = open_exporter(config.telemetry, run=str(config.run_path))
        self.resources.callback(self.exporter.close)  # the last but the journal: a scrape is to see how a run ended
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
        self.ledger.recover(self.writer.write, withhold_s=withhold_s, drop_changed=self.accepts_changes)
        self.ledger.advance(self.progress.version)
        self.resources.enter_context(closing(PromptsAhead(self.ledger, self.processor)))
        self.publication = self.resources.enter_context(open_publication(self.run_id))
        self.device_sender = (
            open_device_sender(
                config.rollout, config.network, self.publication, self.engine, first_s=config.first_meeting_s
            )
            if config.sends_device_versions
            else None
        )
        if self.device_sender:
            self.resources.callback(self.device_sender.close)
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
                self.engine.traces,
            ),
            version=max(self.progress.version, self.ledger.last_step),
            parity_tickets=self.parity_tickets,
            device_sender=self.device_sender,
            open_sources=source_opener(config.rollout),
            check_run=self._check_run,
        )
        self.resources.callback(lambda: self.network.stop(self.goodbye, run_is_finished=self.goodbye == FINISHED))
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
            held_out_labels=self.writer.held_out_labels,
        )
        self.resources.callback(self.reporter.close)
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
            self.status,
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
        self.resources.callback(lambda: self.saver.close(waits=not self.stop.hurries))

    def gone_rank(self) -> Exception | None:
        """Cause of another rank's end: torchrun interrupts the others for it."""
        return self.leader.processes.find_gone() if self.leader else None

    def _check_run(self) -> None:
        """Raise what has ended another rank, or StopAsked."""
        if self.leader:
            self.leader.processes.check()
        self.stop.check()

    def status(self, phase: str, waiting_for: str = "") -> None:
        self.reporter.status(phase, self.progress.step, self.progress.version, waiting_for)
