"""Metric tables become Prometheus endpoints, and whole arrays become histograms."""

from __future__ import annotations

import urllib.request

import numpy as np
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncrl.errors import UserError
from asyncrl_plugins.prometheus.learner_metrics import METRICS as LEARNER_METRICS
from asyncrl_plugins.prometheus.metric_set import Histogram, MetricSet, ServiceMetrics
from asyncrl_plugins.prometheus.server_metrics import METRICS as ROLLOUT_METRICS

LEARNER = ServiceMetrics("asyncrl_learner_")
TABLE = (
    LEARNER.counter("steps", "steps", "Steps.", "rises"),
    LEARNER.counter("rows", "rows", "Rows | by status.", "finished", "status"),
    LEARNER.histogram("staleness", "versions", (0, 1, 2), "Staleness.", "low"),
)


def scrape(metrics: MetricSet) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    port = metrics.serve("127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    finally:
        metrics.close()
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_what_was_counted_is_what_a_scrape_reads() -> None:
    metrics, other = MetricSet(TABLE, "learner"), MetricSet(TABLE, "learner")
    metrics["steps_total"].inc(3)
    metrics["asyncrl_learner_rows_total"].labels(status="finished").inc(5)
    metrics["staleness"].observe_counts(np.array([0, 0, 1, 7]))
    values = scrape(metrics)
    assert values["asyncrl_learner_steps_total", ()] == 3
    assert values["asyncrl_learner_rows_total", (("status", "finished"),)] == 5
    assert values["asyncrl_learner_staleness_bucket", (("le", "0.0"),)] == 2
    assert values["asyncrl_learner_staleness_bucket", (("le", "2.0"),)] == 3
    assert values["asyncrl_learner_staleness_bucket", (("le", "+Inf"),)] == 4
    assert values["asyncrl_learner_staleness_sum", ()] == 8
    names = {name for name, _ in values}
    assert {"python_info", "process_start_time_seconds", "asyncrl_learner_staleness_count"} <= names
    assert "asyncrl_learner_staleness_created" not in names
    assert other.registry.get_sample_value("asyncrl_learner_steps_total") == 0, "two sets share nothing"


@pytest.mark.parametrize(("table", "service"), [(LEARNER_METRICS, "learner"), (ROLLOUT_METRICS, "rollout")])
def test_the_tables_of_both_services_build_and_can_be_scraped(table, service) -> None:
    metrics = MetricSet(table, service)
    metrics.before_scrape(lambda: None)
    names = {name for name, _ in scrape(metrics)}
    for metric in table:
        assert metric.help
        assert metric.healthy
        shown = f"{metric.name}_bucket" if metric.kind == "histogram" else metric.name
        assert metric.labels or shown in names


def test_a_busy_port_is_an_error_that_names_the_setting() -> None:
    holder, late = MetricSet((), "learner"), MetricSet((), "learner")
    port = holder.serve("127.0.0.1", 0)
    with pytest.raises(UserError, match=rf":{port}: .*telemetry\.learner_port"):
        late.serve("127.0.0.1", port)
    holder.close()
    assert late.serve("127.0.0.1", port) == port, "close should free the port"
    late.close()


def test_a_whole_array_counts_like_one_observation_per_value() -> None:
    bounds = (0.0, 0.5, 1.0, 2.0, 8.0)
    # Values on the bounds themselves are where "le" is easily got wrong.
    values = np.concatenate([np.random.default_rng(0).normal(1, 3, 500), np.repeat(bounds, 3), [100.0]])
    theirs, ours = prometheus_client.CollectorRegistry(), prometheus_client.CollectorRegistry()
    reference = prometheus_client.Histogram("h", "h", registry=theirs, buckets=bounds)
    for value in values:
        reference.observe(float(value))
    Histogram("h", "h", registry=ours, buckets=bounds).observe_counts(values.reshape(4, -1))
    for name, labels in (*(("h_bucket", {"le": str(bound)}) for bound in (*bounds, "+Inf")), ("h_sum", {})):
        assert ours.get_sample_value(name, labels) == pytest.approx(theirs.get_sample_value(name, labels)), labels
