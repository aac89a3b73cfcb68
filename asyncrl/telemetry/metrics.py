"""The metrics of one service, built from a table that is also their documentation."""

from __future__ import annotations

import difflib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any, Literal, cast
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    PlatformCollector,
    ProcessCollector,
    start_http_server,
)
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from asyncrl.errors import UserError
from asyncrl.telemetry.histogram import Histogram

logger = logging.getLogger(__name__)

STOP_DEADLINE_S = 5.0
"""Longest wait for the endpoint's thread when a service closes it."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One line of a service's table of metrics."""

    name: str
    """Full Prometheus name, `asyncrl_<service>_<what>_<unit>`; counters end in `_total`."""
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    help: str
    healthy: str
    """What a reader should expect of a good run."""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, rising; infinity is added."""
    looked_at: bool = False
    """On each scrape, once there is something to look at: only then there is the gauge. Any other is NaN until it is
    set. 0 would be taken for a measurement, and a residual of NaN for one that is not 0."""


def gauge(name: str, unit: str, help: str, healthy: str, *labels: str) -> Metric:
    return Metric(name=name, kind="gauge", unit=unit, help=help, healthy=healthy, labels=labels)


def looked_at(name: str, unit: str, help: str, healthy: str) -> Metric:
    return replace(gauge(name, unit, help, healthy), looked_at=True)


def counter(name: str, unit: str, help: str, healthy: str, *labels: str) -> Metric:
    return Metric(name=f"{name}_total", kind="counter", unit=unit, help=help, healthy=healthy, labels=labels)


def histogram(
    name: str, unit: str, buckets: Sequence[float], help: str, healthy: str, labels: tuple[str, ...] = ()
) -> Metric:
    return Metric(
        name=name, kind="histogram", unit=unit, help=help, healthy=healthy, labels=labels, buckets=tuple(buckets)
    )


def device_memory(prefix: str) -> Metric:
    """What both services have a device for."""
    return gauge(
        f"{prefix}device_bytes",
        "bytes",
        "Memory of its device by state (allocated, reserved, free), as seen last in each phase (awake, asleep).",
        "free above 0; asleep allocated near 0",
        "state",
        "phase",
    )


class MetricSet:
    """Prometheus objects of one service, in a registry of their own.

    `metrics.steps_total`, `metrics["steps_total"]` and `metrics["asyncrl_learner_steps_total"]` are the
    same object: a `Counter`, `Gauge` or `asyncrl.telemetry.histogram.Histogram`.
    """

    def __init__(self, table: Sequence[Metric], service: Literal["learner", "rollout"]):
        self.registry = CollectorRegistry()
        self._service = service
        self._prefix = f"asyncrl_{service}_"
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        self._endpoint: tuple[WSGIServer, threading.Thread] | None = None
        self._raised: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._refresh = _Refresh(self.registry)  # first: it is asked first
        self._unseen: list[Gauge] = []
        for metric in table:
            self._metrics[self._short(metric.name)] = self._build(metric)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def _short(self, name: str) -> str:
        if not name.startswith(self._prefix):
            raise ValueError(f"{name} should start with {self._prefix}")
        return name.removeprefix(self._prefix)

    def _build(self, metric: Metric) -> Counter | Gauge | Histogram:
        if (metric.kind == "histogram") != bool(metric.buckets):
            raise ValueError(f"{metric.name}: a {metric.kind} with buckets {metric.buckets}")
        if (metric.kind == "counter") != metric.name.endswith("_total"):
            raise ValueError(f"{metric.name}: counters, and only counters, end in _total")
        if metric.kind == "histogram":
            return Histogram(metric.name, metric.help, metric.labels, metric.buckets, self.registry)
        if metric.kind == "counter":
            return Counter(metric.name, metric.help, metric.labels, registry=self.registry)
        built = Gauge(metric.name, metric.help, metric.labels, registry=None if metric.looked_at else self.registry)
        if metric.looked_at:
            self._unseen.append(built)
        elif not metric.labels:
            built.set(nan)
        return built

    def __getitem__(self, name: str) -> Any:
        short = name.removeprefix(self._prefix)
        if short not in self._metrics:
            close = difflib.get_close_matches(short, self._metrics, n=1)
            raise KeyError(f"no metric {name}" + (f"; did you mean {close[0]}?" if close else ""))
        return self._metrics[short]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def raise_to(self, name: str, total: float, **labels: str) -> None:
        """Let a counter stand at a total that something else counts. One that fell has begun again from 0."""
        key = (name, tuple(sorted(labels.items())))
        before = self._raised.get(key, 0.0)
        counter = self[name].labels(**labels) if labels else self[name]
        counter.inc(total - before if total >= before else total)
        self._raised[key] = total

    def before_scrape(self, refresh: Callable[[], None]) -> None:
        """Called on the endpoint's thread before each answer: for what is cheap to look at and changes all the time."""
        self._refresh.call = refresh
        while self._unseen:
            self.registry.register(self._unseen.pop())

    def include(self, prefix: str) -> None:
        """Answer, too, with what a library keeps in prometheus_client's own registry under names of this prefix.

        Not with all of that registry: it repeats the metrics of the process that are here already.
        """
        self.registry.register(_OfALibrary(prefix))

    def serve(self, host: str, port: int) -> int:
        """Answer `GET /metrics` from a daemon thread; returns the port, which port 0 leaves to the system."""
        key = f"telemetry.{self._service}_port"
        try:
            server, thread = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise UserError(
                f"cannot serve metrics on {host}:{port}: {error.strerror or error}. "
                f"Set {key} to a free port, or telemetry.host to an address of this machine"
            ) from error
        self._endpoint = (server, thread)
        bound = cast(int, server.server_port)
        logger.info("metrics on http://%s:%d/metrics", f"[{host}]" if ":" in host else host, bound)
        return bound

    def close(self) -> None:
        """Free the port. Harmless when nothing is served."""
        if self._endpoint is None:
            return
        server, thread = self._endpoint
        self._endpoint = None
        server.shutdown()
        server.server_close()
        thread.join(STOP_DEADLINE_S)


class _Refresh(Collector):
    """Has no metrics: being collected is the occasion, of one scrape after another."""

    def __init__(self, registry: CollectorRegistry):
        self.call: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        registry.register(self)

    def describe(self) -> Iterator[Family]:
        return iter(())

    def collect(self) -> Iterator[Family]:
        with self._lock:  # two scrapes at once would each raise a counter by the same
            self.call()
        return iter(())


class _OfALibrary(Collector):
    def __init__(self, prefix: str):
        self._prefix = prefix

    def collect(self) -> Iterator[Family]:
        return (family for family in REGISTRY.collect() if family.name.startswith(self._prefix))


def document(table: Sequence[Metric]) -> str:
    """The table in Markdown."""
    lines = [
        "| metric | kind | unit | labels | meaning | healthy |",
        "|---|---|---|---|---|---|",
    ]
    for metric in table:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        cells = (f"`{metric.name}`", metric.kind, metric.unit, labels, metric.help, metric.healthy)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
