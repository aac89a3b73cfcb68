"""Prometheus metrics of the rollout server, set as things happen or, where they always change, at each scrape."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil
import torch
from prometheus_client import CollectorRegistry

from asyncrl.config.run_sections import TelemetryConfig
from asyncrl.models.devices import memory_by_state
from asyncrl.telemetry.metrics import MetricSet
from protocol.messages import Group, ServerHeartbeat, WeightsLoaded
from rollout_server.engines.base import EngineUsage
from rollout_server.metrics import METRICS


@dataclass(frozen=True)
class ServerState:
    """State of the server at a heartbeat."""

    usage: EngineUsage
    beat: ServerHeartbeat
    learner_heard_at: float
    """Monotonic seconds."""
    waiting_for: str
    """Thing that an engine without work waits for: tickets, weights, device or learner."""
    is_asleep: bool


class ServerExporter:
    def __init__(self, config: TelemetryConfig):
        self._config = config
        self._metrics = MetricSet(METRICS, "rollout")
        self._metrics.include("vllm:")
        for name in ("errors_total", "reward_errors_total"):
            self._metrics[name].labels(kind="other")  # so that there is a series before the first one
        self._beat_at: float | None = None
        """Time of the last heartbeat; None while the engine loads, which takes minutes."""
        self._heard_at: float | None = None
        self._state: ServerState | None = None
        self._waited: dict[str, float] = {}
        self._lingers = False
        self._process = psutil.Process()

    @property
    def registry(self) -> CollectorRegistry:
        return self._metrics.registry

    def serve(self, device: Callable[[], torch.device]) -> None:
        """Raises UserError where the endpoint's port is taken. `device` is asked at each scrape."""
        self._device = device
        self._metrics.before_scrape(self._look)
        self._metrics.serve(self._config.host, self._config.rollout_port)

    # --- as it happens -------------------------------------------------------------------------------

    def produced(self, group: Group) -> None:
        self._metrics["groups_total"].inc()
        self._metrics["generate_seconds"].observe(group.timings.generate_s)
        self._metrics["reward_seconds"].observe(group.timings.reward_s)
        for record, length in zip(group.trajectories, group.lengths.tolist(), strict=True):
            self._metrics["trajectories_total"].labels(status=str(record.status)).inc()
            self._metrics["completion_tokens"].observe(length)
            if record.error_kind:
                self._metrics["reward_errors_total"].labels(kind=record.error_kind).inc()

    def loaded(self, loaded: WeightsLoaded, nbytes: int) -> None:
        self._metrics["policy_version"].set(loaded.version)
        self._metrics["weight_seconds"].labels(phase="transfer").observe(loaded.transfer_s)
        self._metrics["weight_seconds"].labels(phase="load").observe(loaded.load_s)
        self._metrics["weight_bytes_total"].inc(nbytes)

    def failed(self, kind: str) -> None:
        self._metrics["errors_total"].labels(kind=kind).inc()

    def turn_began(self, fence: int) -> None:
        self._metrics["lease_fence"].set(fence)

    def stale_fence(self) -> None:
        self._metrics["stale_fences_total"].inc()

    def woke(self, seconds: float, asleep_s: float) -> None:
        """`asleep_s` since the start."""
        self._metrics["wake_seconds"].set(seconds)
        self._metrics.raise_to("asleep_seconds_total", asleep_s)

    def slept(self, seconds: float, nbytes: int) -> None:
        self._metrics["sleep_seconds"].set(seconds)
        self._metrics["sleep_bytes"].set(nbytes)

    def said_hello(self) -> None:
        """Note a hello to a learner that has not answered yet. Its silence begins with the first one."""
        self._beat_at = time.monotonic()
        if self._heard_at is None:
            self._heard_at = self._beat_at

    def beat(self, state: ServerState) -> None:
        """Note a heartbeat. Time without work since the last one counts for what is waited for now."""
        before = self._state.beat if self._state else None
        uptime_s = state.beat.uptime_s - (before.uptime_s if before else 0.0)
        idle_s = max(0.0, uptime_s - (state.usage.busy_s - (before.busy_s if before else 0.0)))
        self._waited[state.waiting_for] = self._waited.get(state.waiting_for, 0.0) + idle_s
        self._state, self._beat_at, self._heard_at = state, time.monotonic(), state.learner_heard_at

    def stopped(self, kind: str) -> None:
        self._metrics["stopped"].labels(kind=kind).set(1)
        self._lingers = kind == "finished"

    # --- at a scrape ---------------------------------------------------------------------------------

    def _look(self) -> None:
        """Set the metrics of a scrape; runs on the endpoint's thread."""
        m, now = self._metrics, time.monotonic()
        if self._beat_at is not None:
            m["pulse_age_seconds"].set(now - self._beat_at)
        m["rss_bytes"].set(self._resident_bytes())
        if self._heard_at is not None:
            m["learner_silence_seconds"].set(now - self._heard_at)
        state = self._state
        if state is None:
            return
        for name, total in (
            ("tokens_total", state.usage.tokens_generated),
            ("busy_seconds_total", state.usage.busy_s),
            ("update_pause_seconds_total", state.usage.update_pause_s),
        ):
            m.raise_to(name, total)
        for what, seconds in dict(self._waited).items():
            m.raise_to("waiting_seconds_total", seconds, **{"for": what})
        for name in ("queued", "running", "unacknowledged"):
            m["held_groups"].labels(state=name).set(getattr(state.beat, f"groups_{name}"))
        m["idle_ratio"].set(1 - state.beat.busy_s / max(state.beat.uptime_s, 1e-9))
        m["sequences_running"].set(state.usage.sequences_running)
        m["kv_cache_ratio"].set(state.usage.kv_cache_ratio)
        phase = "asleep" if state.is_asleep else "awake"
        for name, nbytes in memory_by_state(self._device()).items():
            m["device_bytes"].labels(state=name, phase=phase).set(nbytes)

    def _resident_bytes(self) -> int:
        """Resident memory of this process and its children: reward workers, and an engine's processes."""
        total = 0
        for process in (self._process, *self._process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                total += process.memory_info().rss
        return total

    def close(self) -> None:
        """Close the endpoint, after `telemetry.linger_s`, so that a scrape sees that the run has finished."""
        if self._lingers:
            time.sleep(self._config.linger_s)
        self._metrics.close()
