"""Between two steps: the device is lent, servers that join are judged, held-out rows are scored, tickets let out.

The weights stand still here, so what is compared and scored is of `progress.version`.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.timeline import WaitClock
from learner.network.device_lease import DeviceTurns, OwnDevice
from learner.network.parity_check import ParityJudge
from learner.network.thread import NetworkThread
from learner.network.waiting import wait_for
from learner.progress import Progress
from learner.tickets.ledger import TicketLedger
from learner.training.evaluation import Evaluation

TellStatus = Callable[[str, str], None]
"""Given the phase, and what is waited for."""


class StepSchedule:
    """Of the main thread."""

    def __init__(
        self,
        config: RunConfig,
        progress: Progress,
        exchange: NetworkThread,
        ledger: TicketLedger,
        device: DeviceTurns | OwnDevice,
        judge: ParityJudge,
        evaluation: Evaluation,
        waits: WaitClock,
        tell: TellStatus,
    ):
        self._config = config
        self._progress = progress
        self._exchange = exchange
        self._ledger = ledger
        self._device = device
        self._judge = judge
        self._evaluation = evaluation
        self._waits = waits
        self._tell = tell

    @property
    def needs_server(self) -> bool:
        """Steps are left, or the last evaluation."""
        return not self._progress.is_last or self._evaluation.is_due(self._progress)

    def wait_for_server(self) -> None:
        self._tell("waiting", "the first rollout server")
        with self._waits.waiting("server"):
            wait_for(
                self._exchange,
                self._ledger,
                lambda: bool(self._exchange.servers),
                timeout_s=self._config.network.start_timeout_s,
                what=lambda: f"a rollout server at {self._config.control_endpoint} (network.start_timeout_s)",
            )

    def wait_for_batch(self) -> None:
        """The device is ours on return."""
        self._device.lend()
        with self._waits.waiting("groups"):
            wait_for(
                self._exchange,
                self._ledger,
                lambda: self._ledger.ready() and not self._exchange.alignment.holds_step,
                timeout_s=self._config.learner.wait_timeout_s,
                what=lambda: f"{self._describe_wait()} (learner.wait_timeout_s)",
                judge=self._judge_servers,
                progress=lambda: self._tell("training", self._describe_wait()),
            )
        self.take_device_back()

    def take_device_back(self) -> None:
        with self._waits.waiting("device"):
            self._device.take_back(lambda: self._tell("waiting", f"the device: {self._device.who}"))

    def _describe_wait(self) -> str:
        counts = self._ledger.counts()
        needed = self._config.batch.prompts_per_step
        text = f"groups of step {self._progress.step + 1} (needs {needed}, has {counts.buffered})"
        blockers = self._ledger.blockers()
        if self._device.is_shared:
            text += f"; the device: {self._device.who}"
        if not self._exchange.servers:
            return f"{text}; no rollout server is connected"
        held_by = self._exchange.alignment.holds_step
        if held_by:
            return f"{text}; the log-probs of {held_by} are being checked"
        if blockers:
            ticket_id, server_id, age_s = blockers[0]
            text += f"; oldest: ticket {ticket_id}, {age_s:.0f} s, held by {server_id or 'no server'}"
        return text

    def _judge_servers(self) -> None:
        """On our device, which the server gets back afterwards."""
        if not self._exchange.alignment.has_complete:
            return
        self.take_device_back()
        self._judge.judge(self._progress.version)
        self._device.lend()

    # --- tickets and evaluation -------------------------------------------------------------------

    def open_for_work(self) -> None:
        """Evaluate if it is time to, and let out the tickets of this version."""
        step, version = self._progress.step, self._progress.version
        if self._evaluation.is_due(self._progress):
            self.admit_unless_evaluating()
            self._tell("evaluating", f"{self._evaluation.num_rows} held-out rows")
            self._device.lend()
            with self._waits.waiting("evaluation"):
                self._evaluation.run(step, version, self._judge_servers)
        self._exchange.admit(version)

    def admit_unless_evaluating(self) -> None:
        """On-policy, an evaluation has the servers to itself: how tickets share a batch would depend on its timing."""
        if self._config.largest_staleness or not self._evaluation.is_due(self._progress):
            self._exchange.admit(self._progress.version)
