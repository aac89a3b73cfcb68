"""The work between two steps: lend the device, judge servers that join, score held-out rows, send tickets.

The weights do not move here, so everything that is compared and scored belongs to `progress.version`.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.timeline import WaitClock
from learner.network.device_lease import DeviceTurns
from learner.network.parity_check import ParityJudge
from learner.network.thread import NetworkThread
from learner.tickets.ledger import TicketLedger
from learner.training.evaluation import Evaluation
from learner.training.trainer import Progress


class StepSchedule:
    """Used by the main thread."""

    def __init__(
        self,
        config: RunConfig,
        progress: Progress,
        network: NetworkThread,
        ledger: TicketLedger,
        device: DeviceTurns,
        judge: ParityJudge,
        evaluation: Evaluation,
        waits: WaitClock,
        status: Callable[[str, str], None],
    ):
        """`status` is given the phase, and what is waited for."""
        self._config = config
        self._progress = progress
        self._network = network
        self._ledger = ledger
        self._device = device
        self._judge = judge
        self._evaluation = evaluation
        self._waits = waits
        self._status = status

    @property
    def needs_server(self) -> bool:
        """Whether steps are left, or the last evaluation."""
        return not self._progress.is_last or self._evaluation.is_due(self._progress)

    def wait_for_server(self) -> None:
        self._status("waiting", "the first rollout server")
        with self._waits.waiting("server"):
            self._network.wait_until(
                lambda: bool(self._network.servers.connected),
                timeout_s=self._config.network.start_timeout_s,
                what=lambda: f"a rollout server at {self._config.control_endpoint} (network.start_timeout_s)",
            )

    def wait_for_batch(self) -> None:
        """Wait for the groups of the next step. The learner has the device on return."""
        self._device.lend()
        with self._waits.waiting("groups"):
            self._network.wait_until(
                lambda: self._ledger.ready() and not self._network.parity.holds_step,
                timeout_s=self._config.learner.wait_timeout_s,
                what=lambda: f"{self._describe_wait()} (learner.wait_timeout_s)",
                judge=self._judge_servers,
                progress=lambda: self._status("training", self._describe_wait()),
            )
        self.take_device_back()

    def take_device_back(self) -> None:
        with self._waits.waiting("device"):
            self._device.take_back(self._report_device_wait)

    def _report_device_wait(self) -> None:
        self._network.check()
        self._status("waiting", f"the device: {self._device.holder}")

    def _describe_wait(self) -> str:
        needed, buffered = self._config.batch.prompts_per_step, self._ledger.counts().buffered
        text = f"groups of step {self._progress.step + 1} (needs {needed}, has {buffered})"
        if self._device.is_shared:
            text += f"; the device: {self._device.holder}"
        if not self._network.servers.connected:
            return f"{text}; no rollout server is connected"
        compared = self._network.parity.holds_step
        if compared:
            return f"{text}; the log-probs of {compared} are being checked"
        for ticket_id, server_id, age_s in self._ledger.blockers()[:1]:
            text += f"; oldest: ticket {ticket_id}, {age_s:.0f} s, held by {server_id or 'no server'}"
        return text

    def _judge_servers(self) -> None:
        """Compare log-probs on the learner's device, which the server gets back afterwards."""
        if self._network.parity.has_complete:
            self.take_device_back()
            self._judge.judge(self._progress.version)
            self._device.lend()

    # --- tickets and evaluation -------------------------------------------------------------------

    def open_for_work(self) -> None:
        """Evaluate if it is time to, and send the tickets of this version."""
        step, version = self._progress.step, self._progress.version
        if self._evaluation.is_due(self._progress):
            self.admit_unless_evaluating()
            self._status("evaluating", f"{self._evaluation.num_rows} held-out rows")
            self._device.lend()
            with self._waits.waiting("evaluation"):
                self._evaluation.run(step, version, self._judge_servers)
        self._admit()

    def admit_unless_evaluating(self) -> None:
        """Send tickets, but no training tickets beside an on-policy evaluation: how they share batches would depend on
        its timing."""
        if self._config.largest_staleness or not self._evaluation.is_due(self._progress):
            self._admit()

    def _admit(self) -> None:
        self._network.call_soon(self._network.tickets.admit, self._progress.version)
