"""The learner's Prometheus endpoint: values set at the end of each step, and values read at each scrape."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from math import isfinite, nan
from pathlib import Path

import numpy as np
import psutil
import torch
from prometheus_client import CollectorRegistry

from asyncrl.algorithms.diagnostics import STALENESS_BUCKETS
from asyncrl.config.run_sections import TelemetryConfig
from asyncrl.devices.device import memory_by_state
from asyncrl.telemetry.timeline import WaitClock
from asyncrl_plugins.prometheus.learner_metrics import (
    GAUGE_OF_RANK_RECORD,
    GAUGE_OF_RECORD,
    GAUGE_OF_STALENESS_RECORD,
    METRICS,
    PERCENTILE_OF_RECORD,
)
from asyncrl_plugins.prometheus.metric_set import MetricSet
from asyncrl_plugins.prometheus.peak_flops import peak_flops
from learner.network.thread import NetworkThread
from learner.reporting.exporter import LearnerExporter
from learner.tickets.ledger import TicketLedger
from learner.training.batch import Batch
from protocol.endpoints import SHARED_MEMORY
from protocol.messages import TicketKind, WeightManifest

MOST_SERVERS = 64
"""Servers with series of their own."""


class PrometheusLearner(LearnerExporter):
    """The learner's metrics. Methods whose names begin with `_read` run on the endpoint's thread."""

    def __init__(self, config: TelemetryConfig, run: str):
        """`run` names the run in every series. Raises UserError where the endpoint's port is taken."""
        self._linger_s = config.linger_s
        self._lingers = False
        self._best_accuracy = nan
        self._scoring = 0
        self._metrics = MetricSet(METRICS, "learner", run)
        # Series exist before the first error.
        self._metrics["errors_total"].labels(kind="other")
        for number in ("loss", "grad_norm"):
            self._metrics["not_finite_total"].labels(number=number)
        self._parity: dict[str, dict[str, float]] = {}
        """Largest and mean difference by server, gone ones included: one that only was away is not compared again."""
        self._metrics.serve(config.host, config.learner_port)

    @property
    def registry(self) -> CollectorRegistry:
        return self._metrics.registry

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
        """Read these at each scrape from now on. `step`: the last step of an earlier process."""
        self._network = network
        self._ledger = ledger
        self._waits = waits
        self._device = device
        self._is_asleep = is_asleep
        self._run_path = run_path
        self._process = psutil.Process()
        self._step_at = time.monotonic()
        network.groups.on_kept = self._metrics["journal_lag_seconds"].observe_counts
        self._metrics["step"].set(step)
        self._metrics["total_steps"].set(total_steps)
        self._metrics.before_scrape(self._read)

    def ends_at(self, step: int) -> None:
        """The run ends with this step."""
        self._metrics["total_steps"].set(step)

    def bad_rows(self, counts: Mapping[str, int]) -> None:
        """Set the number of rows that the run leaves out, by source."""
        for source in ("training", "held-out"):
            self._metrics["bad_rows"].labels(source=source).set(counts.get(source, 0))

    def compared(self, server_id: str, largest: float, mean: float) -> None:
        self._parity[server_id] = {"largest": largest, "mean": mean}

    def step(self, step: int, version: int, record: Mapping[str, float], batch: Batch) -> None:
        """Set the values of a finished step; `version` is the one that consumed the batch."""
        m = self._metrics
        self._step_at = time.monotonic()
        m["step"].set(step)
        m["policy_version"].set(version + 1)
        m["steps_total"].inc()
        m["tokens_total"].inc(record["tokens"])
        m["groups_consumed_total"].inc(sum(not item.is_replayed for item in batch.received))
        for name in ("step", "wait", "learn", "publish"):
            m[f"{name}_seconds"].observe(record[f"{name}_s"])
        for name, gauge in GAUGE_OF_RECORD.items():
            value = record.get(name)
            m[gauge].set(nan if value is None else value)
            if value is not None and not isfinite(value):
                m["not_finite_total"].labels(number=gauge).inc()
        m["reward"].clear()  # a component that the last batch has no score of is not shown
        for name, value in record.items():
            section, _, part = name.partition("/")
            if section == "rows":
                m["rows"].labels(status=part).set(value)
                m["trajectories_total"].labels(status=part).inc(value)
            elif section in GAUGE_OF_RANK_RECORD:
                gauge, factor = GAUGE_OF_RANK_RECORD[section]
                m[gauge].labels(rank=part).set(value * factor)
            elif section == "reward" and part != "std":
                m["reward"].labels(component=part).set(value)
            elif section == "checkpoint":
                m["checkpoint_seconds_total"].labels(part=part.removesuffix("_s")).inc(value)
        m["mfu"].set(record["model_flops_per_s"] / peak_flops(self._device))
        for name, percentile in PERCENTILE_OF_RECORD.items():
            m["ratio"].labels(percentile=percentile).set(record.get(name, nan))
        for name, gauge in GAUGE_OF_STALENESS_RECORD.items():
            for bucket in STALENESS_BUCKETS:
                m[gauge].labels(staleness=bucket).set(record.get(f"staleness_{bucket}/{name}", nan))
        self._staleness(version, batch)

    def _staleness(self, version: int, batch: Batch) -> None:
        m = self._metrics
        m["token_staleness_versions"].observe_counts(version - batch.versions[batch.provenance.is_drawn])
        oldest = [item.oldest_version for item in batch.received if item.group.versions.size]
        m["group_staleness_versions"].observe_counts(version - np.asarray(oldest))

    def not_finite(self, number: str) -> None:
        """Count a step that was given up: its loss or grad_norm is not finite."""
        self._metrics["not_finite_total"].labels(number=number).inc()
        self._metrics[number].set(nan)

    def published(self, manifest: WeightManifest) -> None:
        self._metrics["policy_version"].set(manifest.version)
        self._metrics["publish_bytes"].set(manifest.total_bytes)

    def evaluated(self, evaluation: Mapping[str, float | None]) -> None:
        """Set the values of an evaluation, as evaluations.jsonl has it."""
        keys = ("accuracy", "reward", "rows", "errors", "seconds")
        accuracy, reward, rows, errors, seconds = (
            nan if (value := evaluation.get(key)) is None else value for key in keys
        )
        if (scoring := evaluation.get("scoring_changes", 0)) != self._scoring:
            self._scoring, self._best_accuracy = scoring, nan
        self._best_accuracy = float(np.fmax(self._best_accuracy, accuracy))  # NaN loses
        self._metrics["held_out_accuracy"].set(accuracy)
        self._metrics["held_out_best"].set(self._best_accuracy)
        self._metrics["held_out_reward"].set(reward)
        self._metrics["held_out_rows"].set(rows - errors)
        self._metrics["held_out_seconds"].set(seconds)

    def stopped(self, kind: str) -> None:
        """The run is over, or this process gives it up."""
        self._metrics["stopped"].labels(kind=kind).set(1)
        self._lingers = kind not in ("interrupted", "crash")

    def _read(self) -> None:
        self._read_ledger()
        self._read_memory()
        self._read_parity()
        m = self._metrics
        m["last_step_age_seconds"].set(time.monotonic() - self._step_at)
        m["servers"].set(len(self._network.servers.connected))
        m["pulse_age_seconds"].set(max(0.0, time.monotonic() - self._network.servers.stalls.looked_at))
        for what, seconds in self._waits.totals().items():
            m.raise_to("waiting_seconds_total", seconds, **{"for": what})
        m.raise_to("weights_sent_bytes_total", self._network.weights_sent_bytes)
        for kind, count in self._network.servers.errors.copy().items():
            m.raise_to("errors_total", count, kind=kind)

    def _read_ledger(self) -> None:
        m, counts = self._metrics, self._ledger.counts()
        for state in ("issued", "waiting", "in_flight", "buffered", "trained"):
            m["groups"].labels(state=state).set(getattr(counts, state))
        for reason, dropped in counts.dropped.items():
            m["groups"].labels(state=f"dropped_{reason}").set(dropped)
        m["ledger_residual_groups"].set(counts.residual)
        bias = self._ledger.length_bias()
        for state in ("trained", "dropped", "buffered"):
            m["mean_length"].labels(state=state).set(bias.get(f"length/{state}", nan))
        m["length_bias"].set(bias.get("length_bias", nan))
        blockers = self._ledger.blockers()
        m["oldest_ticket_seconds"].set(blockers[0][2] if blockers else 0.0)
        out = self._ledger.out
        m["ticket_deadline_seconds"].set(out.deadline.seconds(TicketKind.TRAIN))
        m.raise_to("tickets_reissued_total", out.reissued)
        m.raise_to("tickets_returned_total", out.returned)
        m.raise_to("tokens_returned_total", out.returned_tokens)
        m.raise_to("duplicate_groups_total", out.duplicates)

    def _read_parity(self) -> None:
        """Show the worst of the connected servers: each process has a name of its own, and there may be a thousand."""
        m, connected = self._metrics, self._network.servers.connected.copy()
        m["parity_max"].clear()
        m["parity_mean"].clear()
        shown = [(parity["largest"], server_id) for server_id, parity in self._parity.copy().items()]
        for _, server_id in sorted((each for each in shown if each[1] in connected), reverse=True)[:MOST_SERVERS]:
            m["parity_max"].labels(server=server_id).set(self._parity[server_id]["largest"])
            m["parity_mean"].labels(server=server_id).set(self._parity[server_id]["mean"])

    def _read_memory(self) -> None:
        m, phase = self._metrics, "asleep" if self._is_asleep() else "awake"
        m["rss_bytes"].set(self._process.memory_info().rss)
        for state, nbytes in memory_by_state(self._device).items():
            m["device_bytes"].labels(state=state, phase=phase).set(nbytes)
        m["shared_memory_bytes"].set(self._network.publication.nbytes)
        if SHARED_MEMORY.is_dir():
            m["shared_memory_free_bytes"].set(shutil.disk_usage(SHARED_MEMORY).free)
        m["journal_bytes"].set(self._ledger.journal.file_bytes)
        disk = shutil.disk_usage(self._run_path)
        m["disk_free_bytes"].set(disk.free)
        m["disk_size_bytes"].set(disk.total)

    def close(self) -> None:
        """Wait `telemetry.linger_s` first, so that a scrape sees how the run ended; not after a crash."""
        if self._lingers:
            time.sleep(self._linger_s)
        self._metrics.close()
