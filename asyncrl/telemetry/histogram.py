"""A Prometheus histogram that takes a whole array of values at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class HistogramSeries:
    """The counts of one combination of label values. Safe to use from several threads."""

    def __init__(self, bounds: np.ndarray):
        self._bounds = bounds
        self._lock = threading.Lock()
        self._counts = np.zeros(len(bounds), dtype=np.int64)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self.observe_counts(np.asarray([value]))

    def observe_counts(self, values: np.ndarray) -> None:
        """Count every value of an array of any shape: one sort into buckets, however many values there are.

        Raises ValueError on NaN, which no bucket can hold.
        """
        flat = np.asarray(values, dtype=np.float64).ravel()
        if flat.size == 0:
            return
        total = float(flat.sum())
        if np.isnan(total) and np.isnan(flat).any():
            raise ValueError(f"{int(np.isnan(flat).sum())} of {flat.size} observed values are NaN")
        # A value belongs to the first bucket whose bound is not below it ("le"), hence side="left".
        buckets = np.searchsorted(self._bounds, flat, side="left")
        counts = np.bincount(buckets, minlength=len(self._bounds))
        with self._lock:
            self._counts += counts
            self._sum += total

    def cumulative(self) -> tuple[list[int], float]:
        """Prometheus' view: how many values were at or below each bound, and their sum."""
        with self._lock:
            return np.cumsum(self._counts).tolist(), self._sum


class Histogram(Collector):
    """Like `prometheus_client.Histogram`, plus `observe_counts`."""

    def __init__(
        self,
        name: str,
        help: str,
        labels: Sequence[str],
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ):
        finite = [float(bound) for bound in buckets if bound != float("inf")]
        if not finite or finite != sorted(set(finite)):
            raise ValueError(f"{name}: buckets must rise strictly and must not be empty: {tuple(buckets)}")
        self._name = name
        self._help = help
        self._labels = tuple(labels)
        self._bounds = np.asarray([*finite, np.inf])
        self._lock = threading.Lock()
        self._series: dict[tuple[str, ...], HistogramSeries] = {}
        if not self._labels:
            self._series[()] = HistogramSeries(self._bounds)
        registry.register(self)

    def labels(self, **values: str) -> HistogramSeries:
        if set(values) != set(self._labels):
            raise ValueError(f"{self._name} has labels {self._labels}, not {tuple(values)}")
        key = tuple(str(values[label]) for label in self._labels)
        with self._lock:
            return self._series.setdefault(key, HistogramSeries(self._bounds))

    def observe(self, value: float) -> None:
        self._unlabelled().observe(value)

    def observe_counts(self, values: np.ndarray) -> None:
        self._unlabelled().observe_counts(values)

    def _unlabelled(self) -> HistogramSeries:
        if self._labels:
            raise ValueError(f"{self._name} needs labels {self._labels}")
        return self._series[()]

    def describe(self) -> Iterator[HistogramMetricFamily]:
        yield HistogramMetricFamily(self._name, self._help, labels=self._labels)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        with self._lock:
            series = list(self._series.items())
        for key, one in series:
            counts, total = one.cumulative()
            bounds = [floatToGoString(bound) for bound in self._bounds]
            family.add_metric(key, list(zip(bounds, counts, strict=True)), total)
        yield family
