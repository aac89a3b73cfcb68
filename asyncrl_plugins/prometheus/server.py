"""Prometheus metrics of the rollout server, set as things happen, at each heartbeat, or at each scrape."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import torch

from asyncrl.config.run_sections import TelemetryConfig
from asyncrl.devices.device import memory_by_state
from asyncrl.environments.episodes import EnvironmentWorkers
from asyncrl.rewards.scorer import RewardScorer
from asyncrl_plugins.prometheus.metric_set import MetricSet
from asyncrl_plugins.prometheus.server_metrics import METRICS
from protocol.messages import Group, ServerHeartbeat, WeightsLoaded
from rollout_server.engines.base import EngineUsage
from rollout_server.exporter import ServerExporter


class PrometheusServer(ServerExporter):
    def __init__(
        self, config: TelemetryConfig, device: Callable[[], torch.device], run: str, *, engine_prefix: str = ""
    ):
        """`device` is asked at each heartbeat. `run` names the run in every series. `engine_prefix`: that of
        the engine's own metrics, which the endpoint shows, too."""
        self._config = config
        self._device = device
        self.metrics = MetricSet(METRICS, "rollout", run)
        if engine_prefix:
            self.metrics.include(engine_prefix)
        for name in ("errors_total", "reward_errors_total"):
            self.metrics[name].labels(kind="other")  # so that there is a series before the first one
        self._beat_at: float | None = None
        """Time of the last heartbeat; None while the engine loads, which takes minutes."""
        self._heard_at: float | None = None
        self._idle_s = 0.0
        """Seconds without work from the start to the last heartbeat."""
        self._lingers = False
        self._process = psutil.Process()

    def serve(self) -> None:
        """Raises UserError where the endpoint's port is taken."""
        self.metrics.before_scrape(self._read)
        self.metrics.serve(self._config.host, self._config.rollout_port)

    # --- as it happens -------------------------------------------------------------------------------

    def produced(self, group: Group) -> None:
        self.metrics["groups_total"].inc()
        self.metrics["generate_seconds"].observe(group.timings.generate_s)
        self.metrics["reward_seconds"].observe(group.timings.reward_s)
        self.metrics["environment_seconds_total"].inc(group.timings.environment_s)
        for record, length in zip(group.trajectories, group.lengths.tolist(), strict=True):
            self.metrics["trajectories_total"].labels(status=str(record.status)).inc()
            self.metrics["completion_tokens"].observe(length)
            self.metrics["turns"].observe(len(record.turns))
            if record.limit:
                self.metrics["limited_trajectories_total"].labels(limit=record.limit).inc()
            if record.error_kind and not record.environment_error:
                self.metrics["reward_errors_total"].labels(kind=record.error_kind).inc()

    def loaded(self, loaded: WeightsLoaded, nbytes: int) -> None:
        self.metrics["policy_version"].set(loaded.version)
        self.metrics["weight_seconds"].labels(phase="transfer").observe(loaded.transfer_s)
        self.metrics["weight_seconds"].labels(phase="load").observe(loaded.load_s)
        self.metrics["weight_bytes_total"].inc(nbytes)

    def said_hello(self) -> None:
        """Record a hello to a learner that has not answered; its silence begins with the first one."""
        self._beat_at = time.monotonic()
        if self._heard_at is None:
            self._heard_at = self._beat_at

    def beat(
        self, usage: EngineUsage, beat: ServerHeartbeat, *, heard_at: float, waiting_for: str, is_asleep: bool
    ) -> None:
        """Update metrics at a heartbeat; idle time since the last one is attributed to `waiting_for`: tickets, weights,
        device or learner. `heard_at`: monotonic time of the learner's last message."""
        m = self.metrics
        idle_s = beat.uptime_s - beat.busy_s
        m["waiting_seconds_total"].labels(**{"for": waiting_for}).inc(max(0.0, idle_s - self._idle_s))
        self._idle_s, self._beat_at, self._heard_at = idle_s, time.monotonic(), heard_at
        m.raise_to("tokens_total", usage.tokens_generated)
        m.raise_to("busy_seconds_total", usage.busy_s)
        m.raise_to("update_pause_seconds_total", usage.update_pause_s)
        for name in ("queued", "running", "unacknowledged"):
            m["held_groups"].labels(state=name).set(getattr(beat, f"groups_{name}"))
        m["idle_ratio"].set(1 - beat.busy_s / max(beat.uptime_s, 1e-9))
        m["sequences_running"].set(usage.sequences_running)
        m["kv_cache_ratio"].set(usage.kv_cache_ratio)
        phase = "asleep" if is_asleep else "awake"
        for name, nbytes in memory_by_state(self._device()).items():
            m["device_bytes"].labels(state=name, phase=phase).set(nbytes)

    def totals(self, rewards: RewardScorer, environments: EnvironmentWorkers | None) -> None:
        m = self.metrics
        m.raise_to("reward_output_dropped_bytes_total", rewards.dropped_bytes)
        for (component, counted), total in rewards.counts.items():  # `requests/answered`, ...
            what, _, which = counted.partition("/")
            label = {"requests": "outcome", "tokens": "kind"}[what]
            m.raise_to(f"reward_{what}_total", total, component=component, **{label: which})
        if environments:
            for kind, total in environments.errors.items():
                m.raise_to("environment_errors_total", total, kind=kind)
            m.raise_to("environment_restarts_total", environments.restarts)
            for do, seconds in environments.take_answers():
                m["environment_answer_seconds"].labels(do=do).observe(seconds)
            m["environment_trajectories"].labels(state="live").set(environments.live)
            m["environment_trajectories"].labels(state="suspended").set(environments.suspended)

    def ticket_failed(self, kind: str) -> None:
        self.metrics["errors_total"].labels(kind=kind).inc()

    def stale_fence(self) -> None:
        self.metrics["stale_fences_total"].inc()

    def took_device(self, fence: int) -> None:
        self.metrics["lease_fence"].set(fence)

    def woke(self, took_s: float, asleep_s: float) -> None:
        self.metrics["wake_seconds"].set(took_s)
        self.metrics["asleep_seconds_total"].inc(asleep_s)

    def fell_asleep(self, took_s: float, moved_bytes: int) -> None:
        self.metrics["sleep_seconds"].set(took_s)
        self.metrics["sleep_bytes"].set(moved_bytes)

    def stopped(self, kind: str) -> None:
        self.metrics["stopped"].labels(kind=kind).set(1)
        self._lingers = kind == "finished"

    # --- at a scrape ---------------------------------------------------------------------------------

    def _read(self) -> None:
        """Refresh gauges at a scrape; runs on the endpoint's thread."""
        now = time.monotonic()
        if self._beat_at is not None:
            self.metrics["pulse_age_seconds"].set(now - self._beat_at)
        if self._heard_at is not None:
            self.metrics["learner_silence_seconds"].set(now - self._heard_at)
        total = 0
        for process in (self._process, *self._process.children(recursive=True)):  # of rewards, and of an engine
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                total += process.memory_info().rss
        self.metrics["rss_bytes"].set(total)

    def close(self) -> None:
        """Close the endpoint, after `telemetry.linger_s`, so that a scrape sees that the run has finished."""
        if self._lingers:
            time.sleep(self._config.linger_s)
        self.metrics.close()
