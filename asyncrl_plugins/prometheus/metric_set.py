"""The metrics of one service, built from a table that is also their documentation."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any, Literal, cast
from wsgiref.simple_server import WSGIServer

import numpy as np
import prometheus_client
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
from prometheus_client.samples import Sample

from asyncrl.errors import UserError

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
    """Values that a reader should expect of a good run."""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, rising; infinity is added."""
    set_on_scrape: bool = False
    """The gauge is set on each scrape, and exported from the first `before_scrape` on. Any other gauge is NaN until it
    is set: 0 would be taken for a measurement, and a residual of NaN for one that is not 0."""


@dataclass(frozen=True)
class ServiceMetrics:
    """Makes the lines of one service's table: names get its prefix, counters their suffix."""

    prefix: str

    def gauge(self, name: str, unit: str, help: str, healthy: str, *labels: str) -> Metric:
        return Metric(name=self.prefix + name, kind="gauge", unit=unit, help=help, healthy=healthy, labels=labels)

    def gauge_set_on_scrape(self, name: str, unit: str, help: str, healthy: str) -> Metric:
        return replace(self.gauge(name, unit, help, healthy), set_on_scrape=True)

    def counter(self, name: str, *rest: str) -> Metric:
        return replace(self.gauge(f"{name}_total", *rest), kind="counter")

    def histogram(
        self, name: str, unit: str, buckets: Sequence[float], help: str, healthy: str, *labels: str
    ) -> Metric:
        return replace(self.gauge(name, unit, help, healthy, *labels), kind="histogram", buckets=tuple(buckets))

    def device_memory(self) -> Metric:
        """The gauge that both services have for their device."""
        return self.gauge(
            "device_bytes",
            "bytes",
            "Memory of its device by state (allocated, reserved, free), as seen last in each phase (awake, asleep).",
            "free above 0; asleep allocated near 0",
            "state",
            "phase",
        )


class Histogram(prometheus_client.Histogram):
    """A Prometheus histogram that counts a whole array of values at once."""

    def observe_counts(self, values: np.ndarray) -> None:
        """Count every value of an array of any shape: one sort into buckets, however many values there are.

        Raises ValueError on NaN, which no bucket can hold.
        """
        self._raise_if_not_observable()
        flat = np.asarray(values, dtype=np.float64).ravel()
        missing = int(np.isnan(flat).sum())
        if missing:
            raise ValueError(f"{missing} of {flat.size} observed values are NaN")
        # A value belongs to the first bucket whose bound is not below it ("le"), hence side="left".
        counts = np.bincount(np.searchsorted(self._upper_bounds, flat, side="left"))
        for bucket, count in zip(self._buckets, counts.tolist(), strict=False):
            bucket.inc(count)
        self._sum.inc(float(flat.sum()))

    def _child_samples(self) -> Iterator[Sample]:
        """Samples without `_created` series."""
        return (sample for sample in super()._child_samples() if sample.name != "_created")


class MetricSet:
    """Prometheus objects of one service, in a registry of their own.

    `metrics["steps_total"]` and `metrics["asyncrl_learner_steps_total"]` are the same `Counter`, `Gauge` or
    `Histogram`.
    """

    def __init__(self, table: Sequence[Metric], service: Literal["learner", "rollout"], run: str = ""):
        """`run` names the run: a label of every series that the endpoint shows, so that two runs on one Prometheus
        never blend."""
        self.registry = CollectorRegistry()
        self._service = service
        self._run = run
        self._prefix = f"asyncrl_{service}_"
        self._endpoint: tuple[WSGIServer, threading.Thread] | None = None
        self._totals: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._refresh = _RefreshOnScrape(self.registry)  # first: it is collected first
        self._unregistered: list[Gauge] = []
        self._metrics = {metric.name.removeprefix(self._prefix): self._build(metric) for metric in table}
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def _build(self, metric: Metric) -> Counter | Gauge | Histogram:
        if metric.kind == "histogram":
            return Histogram(metric.name, metric.help, metric.labels, registry=self.registry, buckets=metric.buckets)
        if metric.kind == "counter":
            return Counter(metric.name, metric.help, metric.labels, registry=self.registry)
        built = Gauge(metric.name, metric.help, metric.labels, registry=None if metric.set_on_scrape else self.registry)
        if metric.set_on_scrape:
            self._unregistered.append(built)
        elif not metric.labels:
            built.set(nan)
        return built

    def __getitem__(self, name: str) -> Any:
        return self._metrics[name.removeprefix(self._prefix)]

    def raise_to(self, name: str, total: float, **labels: str) -> None:
        """Raise a counter to an external total; a smaller total than before has restarted from 0 and is added."""
        key = (name, tuple(sorted(labels.items())))
        before = self._totals.get(key, 0.0)
        counter = self[name].labels(**labels) if labels else self[name]
        counter.inc(total - before if total >= before else total)
        self._totals[key] = total

    def before_scrape(self, refresh: Callable[[], None]) -> None:
        """Call `refresh` on the endpoint's thread before each answer: it sets gauges that change all the time."""
        self._refresh.call = refresh
        while self._unregistered:
            self.registry.register(self._unregistered.pop())

    def include(self, prefix: str) -> None:
        """Export a library's metrics with this prefix, too, from prometheus_client's own registry.

        Not all of that registry: it repeats the metrics of the process.
        """
        self.registry.register(_LibraryMetrics(prefix))

    def serve(self, host: str, port: int, settings: tuple[str, str] | None = None) -> int:
        """Answer `GET /metrics` from a daemon thread; returns the port, which port 0 leaves to the system. `settings`
        names what sets host and port: without it those of `telemetry`. Raises UserError where it cannot."""
        host_of, port_of = settings or ("telemetry.host", f"telemetry.{self._service}_port")
        shown = _OfOneRun(self.registry, self._run) if self._run else self.registry
        try:
            server, thread = start_http_server(port, addr=host, registry=shown)
        except OSError as error:
            raise UserError(
                f"cannot serve metrics on {host}:{port}: {error.strerror or error}. "
                f"Set {port_of} to a free port, or {host_of} to an address of this machine"
            ) from error
        self._endpoint = (server, thread)
        bound = cast(int, server.server_port)
        logger.info("metrics on http://%s:%d/metrics", f"[{host}]" if ":" in host else host, bound)
        return bound

    def close(self) -> None:
        """Free the port, where one is served."""
        if self._endpoint is not None:
            server, thread = self._endpoint
            self._endpoint = None
            server.shutdown()
            server.server_close()
            thread.join(STOP_DEADLINE_S)


class _RefreshOnScrape(Collector):
    """Exports nothing; being collected at the start of a scrape, it refreshes the gauges that are set on scrapes."""

    def __init__(self, registry: CollectorRegistry):
        self.call: Callable[[], None] = lambda: None
        self.__lock = threading.Lock()
        registry.register(self)

    def describe(self) -> Iterator[Family]:
        return iter(())

    def collect(self) -> Iterator[Family]:
        with self.__lock:  # two scrapes at once would each raise a counter by the same
            self.call()
        return iter(())


class _OfOneRun(CollectorRegistry):
    """Shows a registry with the label `run` on every series, those of the process and of libraries included."""

    def __init__(self, shown: Collector, run: str):
        super().__init__()
        self.__shown, self.__run = shown, run

    def collect(self) -> Iterator[Family]:
        for family in self.__shown.collect():
            labelled = Family(family.name, family.documentation, family.type, family.unit)
            labelled.samples = [
                sample._replace(labels={**sample.labels, "run": self.__run}) for sample in family.samples
            ]
            yield labelled

    def restricted_registry(self, names: Iterable[str]) -> Any:
        return _OfOneRun(cast(CollectorRegistry, self.__shown).restricted_registry(names), self.__run)


class _LibraryMetrics(Collector):
    def __init__(self, prefix: str):
        self.__prefix = prefix

    def collect(self) -> Iterator[Family]:
        return (family for family in REGISTRY.collect() if family.name.startswith(self.__prefix))


def document(table: Sequence[Metric]) -> str:
    """The table in Markdown."""
    lines = ["| metric | kind | unit | labels | meaning | healthy |", "|---|---|---|---|---|---|"]
    for metric in table:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        cells = (f"`{metric.name}`", metric.kind, metric.unit, labels, metric.help, metric.healthy)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
