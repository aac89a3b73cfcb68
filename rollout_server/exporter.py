"""Interface of a rollout server's exporter: a plug-in that shows it to a monitoring system (`asyncrl.exporters`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncrl.config.run_sections import TelemetryConfig
from asyncrl.environments.episodes import EnvironmentWorkers
from asyncrl.plugins import implementation, installed_exporter
from asyncrl.rewards.scorer import RewardScorer
from protocol.messages import Group, ServerHeartbeat, WeightsLoaded
from rollout_server.engines.base import EngineUsage


class ServerExporter:
    """Hears of a server's events on its event loop. This one, of an installation without a plug-in, ignores all. An
    exporter's own errors would end the server."""

    def serve(self) -> None:
        """The server begins. Raises UserError where the exporter cannot serve on its port."""

    def said_hello(self) -> None:
        """A hello to a learner that has not answered yet."""

    def produced(self, group: Group) -> None:
        """A group was sent."""

    def ticket_failed(self, kind: str) -> None:
        """A ticket was answered by an error."""

    def loaded(self, loaded: WeightsLoaded, nbytes: int) -> None:
        """The engine has loaded a version of so many bytes."""

    def beat(
        self, usage: EngineUsage, beat: ServerHeartbeat, *, heard_at: float, waiting_for: str, is_asleep: bool
    ) -> None:
        """A heartbeat was sent. `heard_at`: monotonic time of the learner's last message. `waiting_for`: what an idle
        engine waits for: tickets, weights, device or learner."""

    def totals(self, rewards: RewardScorer, environments: EnvironmentWorkers | None) -> None:
        """Counters of the server's parts, at each heartbeat."""

    def stale_fence(self) -> None:
        """A grant or recall of the shared device had been overtaken, and was refused."""

    def took_device(self, fence: int) -> None:
        """The server has the shared device now."""

    def woke(self, took_s: float, asleep_s: float) -> None:
        """The engine has woken up within `took_s`, after `asleep_s` without the device."""

    def fell_asleep(self, took_s: float, moved_bytes: int) -> None:
        """The engine has fallen asleep within `took_s`, and `moved_bytes` have left the device."""

    def stopped(self, kind: str) -> None:
        """The server is done: finished, interrupted, learner_left or failed."""

    def close(self) -> None:
        """Nothing follows. May wait `telemetry.linger_s`."""


def create_exporter(
    config: TelemetryConfig, device: Callable[[], torch.device], run: str, *, engine_prefix: str
) -> ServerExporter:
    """The installed exporter, for a run of this name. `device` is asked at heartbeats. `engine_prefix`: that of the
    engine's own metrics in prometheus_client's registry, empty where it has none."""
    exporter = installed_exporter()
    if exporter is None:
        return ServerExporter()
    return implementation(exporter.rollout_server)(config, device, run, engine_prefix=engine_prefix)
