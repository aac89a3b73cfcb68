"""Work between steps: device leases, parity checks of servers that join, evaluation, tickets.

The weights do not move here, so everything that is compared belongs to `progress.version`.

An evaluation runs beside the steps that the staleness bound allows without newer weights on the servers
(learner/network/ticket_sender.py); the learner waits for it where there are none: on-policy, after the last step,
and before the next evaluation. It also waits before a checkpoint of a later step, from which a restart could not make
the evaluated version again: so an evaluation that a crash has cut short is made again, and recorded once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.config.part_settings import ScheduleSettings
from asyncrl.errors import BadStateError
from asyncrl.rewards.score import accuracies_by_label
from asyncrl.telemetry.timeline import LEARNER, WaitClock
from learner.loop.logprob_parity import ParityJudge
from learner.loop.trainer import Progress
from learner.network.device_lease import LearnerLease
from learner.network.thread import NetworkThread
from learner.reporting.reporter import Reporter
from learner.tickets.evaluation import Evaluation
from learner.tickets.ledger import TicketLedger
from learner.tickets.ticket_writer import TicketWriter

logger = logging.getLogger(__name__)


@dataclass
class StepSchedule:
    """Used by the main thread."""

    settings: ScheduleSettings
    progress: Progress
    network: NetworkThread
    ledger: TicketLedger
    device: LearnerLease
    judge: ParityJudge
    writer: TicketWriter
    reporter: Reporter
    status: Callable[[str, str], None]
    """Called with the phase, and what is waited for."""
    waits: WaitClock = field(default_factory=WaitClock)
    _waited_before_s: float = 0.0
    """Seconds that the learner had waited for evaluations when the running one began."""

    @property
    def needs_server(self) -> bool:
        """True if steps or the last evaluation remain."""
        return not self.progress.is_last or self.is_evaluation_due

    def wait_for_server(self) -> None:
        limit = f"at most {self.settings.start_timeout_s:g} s, network.start_timeout_s"
        self.status("waiting", f"the first rollout server, which loads its model ({limit}); its log says how far it is")
        with self.waits.waiting("server"):
            self.network.wait_until(
                lambda: bool(self.network.servers.connected),
                timeout_s=self.settings.start_timeout_s,
                what=lambda: (
                    f"a rollout server at {self.settings.control_endpoint} (network.start_timeout_s)"
                    f"{self.network.servers.last_refusal}"
                ),
            )

    def wait_for_batch(self) -> float:
        """Wait for the groups of the next step, and return the seconds in which an evaluation held it up.

        The learner has the device on return. There is no step where the ledger `is_over` by then. The deadline is for
        the next group, also one that a filter drops.
        """
        self.device.lend()
        held_up_before_s = self._waited_for_evaluation_s
        while not self._has_batch and not self.ledger.is_over:
            if self._is_held_up:
                self._wait_for_evaluation(lambda: self._has_batch or not self._is_held_up)
            else:
                arrived = self.ledger.counts().arrived
                with self.waits.waiting("groups"):
                    self.network.wait_until(
                        lambda arrived=arrived: self._can_go_on or self.ledger.counts().arrived > arrived,
                        timeout_s=sum(self._patience_s.values()),
                        what=lambda: f"{self._describe_wait()} ({' + '.join(self._patience_s)})",
                        judge=self._judge_servers,
                        progress=lambda: self.status("training", self._describe_wait()),
                    )
            self._record_if_complete()
        self._record_if_complete()
        self.take_device_back()
        return self._waited_for_evaluation_s - held_up_before_s

    @property
    def _patience_s(self) -> dict[str, float]:
        """Longest wait for groups by the setting that it comes from. In sync mode a server starts its engine in its
        first turn, after its welcome."""
        waits = {"learner.wait_timeout_s": self.settings.wait_timeout_s}
        if self.settings.mode == "sync" and not self.network.servers.aligned:
            waits["network.start_timeout_s"] = self.settings.start_timeout_s
        return waits

    @property
    def _has_batch(self) -> bool:
        return self.ledger.ready() and not self.network.parity.holds_step

    @property
    def _can_go_on(self) -> bool:
        """True if there is anything to do but wait for groups."""
        return self._has_batch or self._is_held_up or self._is_evaluated or self.ledger.is_over

    @property
    def _is_held_up(self) -> bool:
        """True if servers may sample training tickets only when the running evaluation has ended."""
        running = self.ledger.evaluation
        return running is not None and not running.is_complete and self.ledger.out.await_version(running.version)

    @property
    def _is_evaluated(self) -> bool:
        running = self.ledger.evaluation
        return running is not None and running.is_complete

    @property
    def _waited_for_evaluation_s(self) -> float:
        return self.waits.totals().get("evaluation", 0.0)

    def take_device_back(self) -> None:
        def report() -> None:
            self.network.check()
            self.status("waiting", f"the device: {self.device.holder}")

        with self.waits.waiting("device"):
            self.device.take_back(report)

    def wait_for_checkpoint(self, is_written: Callable[[], bool], step: int) -> None:
        """Wait for the checkpoint of that step, which is being written, with nothing else to do."""
        what = f"the checkpoint of step {step}, which is being written"
        self.status("waiting", what)
        with self.waits.waiting("checkpoint"):
            self.network.wait_until(
                is_written,
                timeout_s=self.settings.wait_timeout_s,
                what=lambda: (
                    f"{what} (learner.wait_timeout_s). Raise it, save less often (trainer.save_freq), or see whether "
                    f"the disk of {self.settings.run_path} is there"
                ),
            )

    def _describe_wait(self) -> str:
        needed, counts, running = self.settings.prompts_per_step, self.ledger.counts(), self.ledger.evaluation
        step = self.progress.step + 1
        text = f"groups of step {step} (needs {needed}, has {counts.buffered})"
        if counts.buffered >= needed and (late := self.ledger.late()):
            text = f"{len(late)} groups that are due before step {step}, which has the {needed} that it needs"
        if running is not None and not running.is_complete:
            text += f"; the evaluation of step {running.step} goes on ({running.arrived} of {running.rows} rows)"
        if any(counts.dropped.values()):
            text += f"; dropped so far: {counts.describe_dropped()}"
        if self.device.is_shared:
            text += f"; the device: {self.device.holder}"
        if not self.network.servers.connected:
            return f"{text}; no rollout server is connected"
        compared = self.network.parity.holds_step
        if compared:
            return f"{text}; the log-probs of {compared} are being checked"
        for ticket_id, server_id, age_s in self.ledger.blockers()[:1]:
            text += f"; oldest: ticket {ticket_id}, {age_s:.0f} s, held by {server_id or 'no server'}"
        return text

    def _judge_servers(self) -> None:
        """Compare log-probs on the learner's device, which the server gets back afterwards."""
        if self.network.parity.has_complete:
            self.take_device_back()
            self.judge.judge(self.progress.version)
            self.device.lend()

    def end_with_the_data(self) -> None:
        """Make the step so far the last one if no prompt is left, since groups were dropped or rows passed over.

        Raises BadStateError where nothing at all could be trained.
        """
        progress, counts = self.progress, self.ledger.counts()
        if progress.is_last or progress.step < self.ledger.last_step or not self.ledger.is_over:
            return
        dropped = f"of {counts.issued} groups {sum(counts.dropped.values())} were dropped ({counts.describe_dropped()})"
        if not progress.step:
            raise BadStateError(
                f"the data is used up, and no step could be made: {dropped}. Look at the reward (asyncrl doctor), "
                "raise trainer.total_epochs or set trainer.max_steps, or change algorithm.filters"
            )
        logger.info("the data is used up at step %d of %d: %s", progress.step, progress.total_steps, dropped)
        progress.total_steps = progress.step
        self.reporter.ends_at(progress.step)

    # --- tickets and evaluation -------------------------------------------------------------------

    def open_for_work(self) -> None:
        """Begin an evaluation if one is due, and send this version's tickets."""
        if self.is_evaluation_due:
            self.admit_unless_evaluating()
            self._begin_evaluation()
            if self.progress.is_last or not self.settings.max_staleness:
                self.finish_evaluation()
        self._admit()

    def admit_unless_evaluating(self) -> None:
        """Send training tickets unless an on-policy evaluation is due, whose timing would change their batches."""
        if self.settings.max_staleness or not self.is_evaluation_due:
            self._admit()

    def _admit(self) -> None:
        self.network.call_soon(self.network.tickets.admit, self.progress.version)

    @property
    def is_evaluation_due(self) -> bool:
        """True if an evaluation is planned at this step and not recorded yet; the last step always has one."""
        plan, step = self.settings.evaluation, self.progress.step
        if step == 0:
            planned = plan.before_training
        else:
            planned = self.progress.is_last or bool(plan.every_steps and step % plan.every_steps == 0)
        if not planned or not self.writer.num_held_out_rows:
            return False
        running = self.ledger.evaluation
        return (running is None or running.step != step) and step not in self.reporter.evaluated_steps

    def evaluate_again(self) -> None:
        """Make the evaluation of a version that a crash cut short, before the steps after it are made again."""
        self._begin_evaluation()
        self.finish_evaluation()

    def _begin_evaluation(self) -> None:
        """Begin to score the held-out rows with the newest published version."""
        self.finish_evaluation()
        step, version, rows = self.progress.step, self.progress.version, self.writer.num_held_out_rows
        self._waited_before_s = self._waited_for_evaluation_s
        self.ledger.evaluation = Evaluation(step, version, rows, self.writer.write_evaluation, self.ledger.changed)
        self.network.publication.hold(version)  # here: the next versions may be published before the thread's turn
        self.network.call_soon(self.network.evaluations.begin, self.ledger.evaluation)

    def finish_evaluation(self, before_step: int | None = None, gives_up: Callable[[], bool] = lambda: False) -> None:
        """Wait for the running evaluation, if there is one (of a step before this one), and record it. Where `gives_up`
        says so before, it is lost."""
        running = self.ledger.evaluation
        if running is None or (before_step is not None and running.step >= before_step):
            return
        self.device.lend()
        self._wait_for_evaluation(lambda: running.is_complete or gives_up())
        if not running.is_complete:
            logger.warning(
                "the evaluation of step %d is cut short at %d of %d rows and not recorded: it would have to end before "
                "the checkpoint of a later step",
                *(running.step, running.arrived, running.rows),
            )
        self._record_if_complete()

    def _wait_for_evaluation(self, is_over: Callable[[], bool]) -> None:
        """Wait with nothing else to do, comparing servers that join meanwhile. The deadline is for the next row."""
        running = self.ledger.evaluation
        assert running is not None

        def describe() -> str:
            return f"a held-out row of step {running.step} ({running.arrived} of {running.rows} have arrived)"

        self.status("evaluating", describe())
        with self.waits.waiting("evaluation"), self.network.timeline.doing(LEARNER, "evaluating"):
            while not is_over():
                before = running.arrived
                self.network.wait_until(
                    lambda before=before: running.arrived > before or is_over(),
                    timeout_s=sum(self._patience_s.values()),
                    what=lambda: f"{describe()} ({' + '.join(self._patience_s)})",
                    judge=self._judge_servers,
                    progress=lambda: self.status("evaluating", describe()),
                )

    def _record_if_complete(self) -> None:
        running = self.ledger.evaluation
        if running is None or not running.is_complete:
            return
        self.ledger.evaluation = None
        waited_s = self._waited_for_evaluation_s - self._waited_before_s
        result = self.reporter.evaluated(running, waited_s)
        message = "step %d: held-out accuracy %.4f over %d rows (%d could not be scored), in %.1f s; waited %.1f s"
        numbers = (result[name] for name in ("accuracy", "rows", "errors", "seconds", "waited_s"))
        logger.info(message, running.step, *numbers)
        if parts := accuracies_by_label(result):
            logger.info("step %d: held-out accuracy by evaluation.by: %s", running.step, parts)
