"""Work between steps: device turns, parity checks of servers that join, evaluation, tickets.

The weights do not move here, so everything that is compared and scored belongs to `progress.version`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.timeline import LEARNER, WaitClock
from learner.network.device_turns import DeviceTurns
from learner.network.logprob_parity import ParityJudge
from learner.network.thread import NetworkThread
from learner.reporting.reporter import Reporter
from learner.tickets.ledger import TicketLedger
from learner.tickets.ticket_writer import TicketWriter
from learner.training.trainer import Progress

logger = logging.getLogger(__name__)


@dataclass
class StepSchedule:
    """Used by the main thread."""

    config: RunConfig
    progress: Progress
    network: NetworkThread
    ledger: TicketLedger
    device: DeviceTurns
    judge: ParityJudge
    writer: TicketWriter
    reporter: Reporter
    status: Callable[[str, str], None]
    """Called with the phase, and what is waited for."""
    waits: WaitClock = field(default_factory=WaitClock)

    @property
    def needs_server(self) -> bool:
        """True if steps or the last evaluation remain."""
        return not self.progress.is_last or self.is_evaluation_due

    def wait_for_server(self) -> None:
        self.status("waiting", "the first rollout server")
        with self.waits.waiting("server"):
            self.network.wait_until(
                lambda: bool(self.network.servers.connected),
                timeout_s=self.config.network.start_timeout_s,
                what=lambda: f"a rollout server at {self.config.control_endpoint} (network.start_timeout_s)",
            )

    def wait_for_batch(self) -> None:
        """Wait for the groups of the next step. The learner has the device on return."""
        self.device.lend()
        with self.waits.waiting("groups"):
            self.network.wait_until(
                lambda: self.ledger.ready() and not self.network.parity.holds_step,
                timeout_s=self.config.learner.wait_timeout_s,
                what=lambda: f"{self._describe_wait()} (learner.wait_timeout_s)",
                judge=self._judge_servers,
                progress=lambda: self.status("training", self._describe_wait()),
            )
        self.take_device_back()

    def take_device_back(self) -> None:
        def report() -> None:
            self.network.check()
            self.status("waiting", f"the device: {self.device.holder}")

        with self.waits.waiting("device"):
            self.device.take_back(report)

    def _describe_wait(self) -> str:
        needed, buffered = self.config.batch.prompts_per_step, self.ledger.counts().buffered
        text = f"groups of step {self.progress.step + 1} (needs {needed}, has {buffered})"
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

    # --- tickets and evaluation -------------------------------------------------------------------

    def open_for_work(self) -> None:
        """Evaluate if due, and send this version's tickets."""
        if self.is_evaluation_due:
            self.admit_unless_evaluating()
            self.status("evaluating", f"{self.writer.num_held_out_rows} held-out rows")
            self.device.lend()
            with self.waits.waiting("evaluation"), self.network.timeline.doing(LEARNER, "evaluating"):
                self._evaluate(self.progress.version)
        self._admit()

    def admit_unless_evaluating(self) -> None:
        """Send training tickets unless an on-policy evaluation is due, whose timing would change their batches."""
        if self.config.largest_staleness or not self.is_evaluation_due:
            self._admit()

    def _admit(self) -> None:
        self.network.call_soon(self.network.tickets.admit, self.progress.version)

    @property
    def is_evaluation_due(self) -> bool:
        """True if an evaluation is planned at this step and not recorded yet; the last step always has one."""
        plan, step = self.config.evaluation, self.progress.step
        if step == 0:
            planned = plan.before_training
        else:
            planned = self.progress.is_last or bool(plan.every_steps and step % plan.every_steps == 0)
        return planned and self.writer.num_held_out_rows > 0 and step not in self.reporter.evaluated_steps

    def _evaluate(self, version: int) -> None:
        """Score every held-out row, comparing servers that join meanwhile. The deadline is for the next row."""
        rows, arrived = self.writer.num_held_out_rows, 0
        tickets = (self.writer.write_evaluation(index, version) for index in range(rows))
        self.network.call_soon(self.network.tickets.prepare, tickets)
        while arrived < rows:
            self.network.wait_until(
                lambda before=arrived: self.ledger.evaluation_arrived() > before,
                timeout_s=self.config.learner.wait_timeout_s,
                what=lambda before=arrived: f"a held-out row ({before} of {rows} have arrived; learner.wait_timeout_s)",
                judge=self._judge_servers,
            )
            arrived = self.ledger.evaluation_arrived()
        result = self.reporter.evaluated(self.progress.step, version, self.ledger.take_evaluation())
        message = "step %d: held-out accuracy %.4f over %d rows (%d could not be scored)"
        logger.info(message, self.progress.step, result["accuracy"], result["rows"], result["errors"])
