"""The work between two steps: lend the device, judge servers that join, score held-out rows, send tickets.

The weights do not move here, so everything that is compared and scored belongs to `progress.version`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.timeline import WaitClock
from learner.network.device_lease import DeviceTurns
from learner.network.logprob_parity import ParityJudge
from learner.network.thread import NetworkThread
from learner.tickets.ledger import TicketLedger
from learner.training.evaluation import Evaluation
from learner.training.trainer import Progress


@dataclass
class StepSchedule:
    """Used by the main thread."""

    config: RunConfig
    progress: Progress
    network: NetworkThread
    ledger: TicketLedger
    device: DeviceTurns
    judge: ParityJudge
    evaluation: Evaluation
    waits: WaitClock
    status: Callable[[str, str], None]
    """Called with the phase, and what is waited for."""

    @property
    def needs_server(self) -> bool:
        """Whether steps are left, or the last evaluation."""
        return not self.progress.is_last or self.evaluation.is_due(self.progress)

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
        """Evaluate if it is time to, and send the tickets of this version."""
        step, version = self.progress.step, self.progress.version
        if self.evaluation.is_due(self.progress):
            self.admit_unless_evaluating()
            self.status("evaluating", f"{self.evaluation.num_rows} held-out rows")
            self.device.lend()
            with self.waits.waiting("evaluation"):
                self.evaluation.run(step, version, self._judge_servers)
        self._admit()

    def admit_unless_evaluating(self) -> None:
        """Send tickets, but no training tickets beside an on-policy evaluation: how they share batches would depend on
        its timing."""
        if self.config.largest_staleness or not self.evaluation.is_due(self.progress):
            self._admit()

    def _admit(self) -> None:
        self.network.call_soon(self.network.tickets.admit, self.progress.version)
