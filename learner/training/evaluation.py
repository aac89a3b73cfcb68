"""Evaluation: held-out rows scored by the rollout servers, with the tickets and the weights of training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.timeline import LEARNER
from learner.network.thread import NetworkThread
from learner.reporting.reporter import Reporter
from learner.tickets.ledger import TicketLedger
from learner.tickets.ticket_writer import TicketWriter
from learner.training.trainer import Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """Decides when an evaluation is due, and runs it."""

    config: RunConfig
    network: NetworkThread
    ledger: TicketLedger
    writer: TicketWriter
    reporter: Reporter

    @property
    def num_rows(self) -> int:
        return self.writer.num_held_out_rows

    def is_due(self, progress: Progress) -> bool:
        """Whether one is planned at this step and not recorded by an earlier process; the last step always has one."""
        plan, step = self.config.evaluation, progress.step
        if step == 0:
            planned = plan.before_training
        else:
            planned = progress.is_last or bool(plan.every_steps and step % plan.every_steps == 0)
        return planned and self.num_rows > 0 and step not in self.reporter.evaluated_steps

    def run(self, step: int, version: int, judge: Callable[[], None]) -> None:
        """Score every held-out row with `version`, comparing servers that join meanwhile (`judge`).

        The deadline is for the next row, however many there are.
        """
        rows = self.num_rows
        with self.network.timeline.doing(LEARNER, "evaluating"):
            tickets = (self.writer.write_evaluation(index, version) for index in range(rows))
            self.network.call_soon(self.network.tickets.prepare, tickets)
            while (arrived := self.ledger.evaluation_arrived()) < rows:
                self.network.wait_until(
                    lambda arrived=arrived: self.ledger.evaluation_arrived() > arrived,
                    timeout_s=self.config.learner.wait_timeout_s,
                    what=lambda arrived=arrived: (
                        f"a held-out row ({arrived} of {rows} have arrived; learner.wait_timeout_s)"
                    ),
                    judge=judge,
                )
            result = self.reporter.evaluated(step, version, self.ledger.take_evaluation())
        message = "step %d: held-out accuracy %.4f over %d rows (%d could not be scored)"
        logger.info(message, step, result["accuracy"], result["rows"], result["errors"])
