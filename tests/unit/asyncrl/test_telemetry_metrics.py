"""Metric tables become Prometheus endpoints, and whole arrays become histograms."""

from __future__ import annotations

import subprocess
import sys
import urllib.request

import numpy as np
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncrl.errors import UserError
from asyncrl.telemetry.metrics import Histogram, Metric, MetricSet, document
from learner.reporting.metrics import METRICS as LEARNER_METRICS
from rollout_server.metrics import METRICS as ROLLOUT_METRICS

TABLE = (
    Metric(name="asyncrl_learner_steps_total", kind="counter", unit="steps", help="Steps.", healthy="rises"),
    Metric(
        name="asyncrl_learner_rows_total",
        kind="counter",
        unit="rows",
        help="Rows | by status.",
        healthy="finished",
        labels=("status",),
    ),
    Metric(
        name="asyncrl_learner_staleness",
        kind="histogram",
        unit="versions",
        help="Staleness.",
        healthy="low",
        buckets=(0, 1, 2),
    ),
)


def scrape(port: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_what_was_counted_is_what_a_scrape_reads() -> None:
    metrics = MetricSet(TABLE, "learner")
    metrics.steps_total.inc(3)
    metrics["asyncrl_learner_rows_total"].labels(status="finished").inc(5)
    metrics["staleness"].observe_counts(np.array([0, 0, 1, 7]))
    port = metrics.serve("127.0.0.1", 0)
    try:
        values = scrape(port)
    finally:
        metrics.close()
    assert values["asyncrl_learner_steps_total", ()] == 3
    assert values["asyncrl_learner_rows_total", (("status", "finished"),)] == 5
    assert values["asyncrl_learner_staleness_bucket", (("le", "0.0"),)] == 2
    assert values["asyncrl_learner_staleness_bucket", (("le", "2.0"),)] == 3
    assert values["asyncrl_learner_staleness_bucket", (("le", "+Inf"),)] == 4
    assert values["asyncrl_learner_staleness_count", ()] == 4
    assert values["asyncrl_learner_staleness_sum", ()] == 8
    assert "python_info" in {name for name, _ in values}
    assert ("process_start_time_seconds", ()) in values


@pytest.mark.parametrize(("table", "service"), [(LEARNER_METRICS, "learner"), (ROLLOUT_METRICS, "rollout")])
def test_the_tables_of_both_services_build_and_can_be_scraped(table, service) -> None:
    metrics = MetricSet(table, service)
    metrics.before_scrape(lambda: None)
    port = metrics.serve("127.0.0.1", 0)
    try:
        names = {name for name, _ in scrape(port)}
    finally:
        metrics.close()
    for metric in table:
        assert metric.help
        assert metric.healthy
        shown = f"{metric.name}_bucket" if metric.kind == "histogram" else metric.name
        assert metric.labels or shown in names


def test_two_sets_in_one_process_share_nothing() -> None:
    first, second = MetricSet(TABLE, "learner"), MetricSet(TABLE, "learner")
    first.steps_total.inc()
    assert first.registry.get_sample_value("asyncrl_learner_steps_total") == 1
    assert second.registry.get_sample_value("asyncrl_learner_steps_total") == 0


@pytest.mark.parametrize(("service", "key"), [("learner", "telemetry.learner_port"), ("rollout", "rollout_port")])
def test_a_busy_port_is_an_error_that_names_the_setting(service, key) -> None:
    holder, late = MetricSet((), service), MetricSet((), service)
    port = holder.serve("127.0.0.1", 0)
    try:
        with pytest.raises(UserError, match=key) as caught:
            late.serve("127.0.0.1", port)
    finally:
        holder.close()
    assert str(port) in str(caught.value)
    assert late.serve("127.0.0.1", port) == port, "close should free the port"
    late.close()


def test_a_whole_array_counts_like_one_observation_per_value() -> None:
    bounds = (0.0, 0.5, 1.0, 2.0, 8.0)
    generator = np.random.default_rng(0)
    # Values on the bounds themselves are where "le" is easily got wrong.
    values = np.concatenate([generator.normal(1, 3, 500), np.repeat(bounds, 3), [100.0]])
    theirs, ours = prometheus_client.CollectorRegistry(), prometheus_client.CollectorRegistry()
    reference = prometheus_client.Histogram("h", "h", registry=theirs, buckets=bounds)
    for value in values:
        reference.observe(float(value))
    Histogram("h", "h", registry=ours, buckets=bounds).observe_counts(values.reshape(4, -1))
    for bound in (*(str(bound) for bound in bounds), "+Inf"):
        expected = theirs.get_sample_value("h_bucket", {"le": bound})
        assert expected is not None
        assert ours.get_sample_value("h_bucket", {"le": bound}) == expected
    assert ours.get_sample_value("h_sum") == pytest.approx(theirs.get_sample_value("h_sum"))


def test_labelled_histograms_count_apart_and_refuse_wrong_labels() -> None:
    registry = prometheus_client.CollectorRegistry()
    histogram = Histogram("h", "h", ("channel",), registry=registry, buckets=(1.0,))
    histogram.labels(channel="shm").observe(0.5)
    histogram.labels(channel="zmq").observe_counts(np.array([2.0, 3.0]))
    assert registry.get_sample_value("h_count", {"channel": "shm"}) == 1
    assert registry.get_sample_value("h_count", {"channel": "zmq"}) == 2
    with pytest.raises(ValueError, match="label names"):
        histogram.labels(chanel="shm")
    with pytest.raises(ValueError, match="missing label"):
        histogram.observe(1.0)


def test_nan_is_refused_and_nothing_is_counted() -> None:
    registry = prometheus_client.CollectorRegistry()
    histogram = Histogram("h", "h", registry=registry, buckets=(1.0,))
    histogram.observe_counts(np.array([]))
    with pytest.raises(ValueError, match="1 of 2"):
        histogram.observe_counts(np.array([0.5, np.nan]))
    assert registry.get_sample_value("h_count") == 0


def test_a_misspelt_name_gets_a_suggestion() -> None:
    metrics = MetricSet(TABLE, "learner")
    with pytest.raises(AttributeError, match="did you mean steps_total"):
        _ = metrics.step_total
    with pytest.raises(KeyError, match="staleness"):
        metrics["stalenes"]


def test_the_table_documents_itself() -> None:
    lines = document(TABLE).splitlines()
    assert len(lines) == 2 + len(TABLE)
    assert "| `asyncrl_learner_rows_total` | counter | rows | `status` | Rows \\| by status. | finished |" in lines


def test_telemetry_imports_no_torch() -> None:
    code = (
        "import sys, asyncrl.telemetry.metrics, asyncrl.telemetry.recorder, asyncrl.telemetry.logs\n"
        "sys.exit(bool({'torch', 'transformers', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=20).returncode == 0
