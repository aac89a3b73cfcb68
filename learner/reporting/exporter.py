"""Interface of a learner's exporter: a plug-in that shows the run to a monitoring system (`asyncrl.exporters`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from asyncrl.config.run_sections import TelemetryConfig
from asyncrl.plugins import implementation, installed_exporter
from asyncrl.telemetry.timeline import WaitClock
from learner.network.thread import NetworkThread
from learner.tickets.ledger import TicketLedger
from learner.training.batch import Batch
from protocol.messages import WeightManifest


class LearnerExporter:
    """Hears of a run's events on the learner's thread, and may read at any time what `watch` gives it. This one, of an
    installation without a plug-in, ignores all. An exporter's own errors would end the run."""

    def watch(
        self,
        network: NetworkThread,
        ledger: TicketLedger,
        waits: WaitClock,
        *,
        device: torch.device,
        is_asleep: Callable[[], bool],
        run_path: Path,
        step: int,
        total_steps: int,
    ) -> None:
        """All parts are there. `step`: the last step of an earlier process."""

    def ends_at(self, step: int) -> None:
        """The run ends with this step, before the planned one."""

    def bad_rows(self, counts: Mapping[str, int]) -> None:
        """Rows that the run leaves out, by source."""

    def compared(self, server_id: str, largest: float, mean: float) -> None:
        """Absolute differences of log-probs between the learner and a server that has joined."""

    def step(self, step: int, version: int, record: Mapping[str, float], batch: Batch) -> None:
        """A finished step, with its line of metrics.jsonl; `version` is the one that consumed the batch."""

    def not_finite(self, number: str) -> None:
        """A step was given up: its `loss` or `grad_norm` is not finite."""

    def published(self, manifest: WeightManifest) -> None:
        """A new policy version is there for the servers."""

    def evaluated(self, evaluation: Mapping[str, float | None]) -> None:
        """An evaluation, as evaluations.jsonl has it."""

    def stopped(self, kind: str) -> None:
        """The run is over, or this process gives it up: finished, interrupted, crash, or a kind of failure.json."""

    def close(self) -> None:
        """Nothing follows. May wait `telemetry.linger_s`."""


def open_exporter(config: TelemetryConfig, run: str) -> LearnerExporter:
    """The installed exporter, for a run of this name. Raises UserError where it cannot serve on its port."""
    exporter = installed_exporter()
    return implementation(exporter.learner)(config, run) if exporter else LearnerExporter()
