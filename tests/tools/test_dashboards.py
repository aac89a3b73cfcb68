"""Grafana's dashboards and Prometheus' alerts: made of metrics that exist, and each alert fires when it should."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from asyncrl_plugins.prometheus.learner_metrics import METRICS as LEARNER
from asyncrl_plugins.prometheus.metric_set import MetricSet
from asyncrl_plugins.prometheus.server_metrics import METRICS as ROLLOUT
from asyncrl_plugins.viewer.recorded_run.alert_thresholds import THRESHOLDS

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
PROMTOOL = shutil.which("promtool")
RULES = DOCKER / "prometheus" / "alerts.yml"
RULE_TESTS = ROOT / "tests" / "rigs" / "alerts.test.yml"


def _rules() -> list[dict[str, Any]]:
    """Rules that alert."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def test_dashboards_are_those_that_grafanas_own_types_write() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed")
    made = runpy.run_path(str(DOCKER / "grafana" / "make_dashboards.py"))
    written = {file.stem: file.read_text() for file in (DOCKER / "grafana" / "dashboards").glob("*.json")}
    assert {uid: made["dashboard"](uid) for uid in made["DASHBOARDS"]} == written


def test_dashboards_and_alerts_know_only_metrics_of_the_tables() -> None:
    texts = RULES.read_text() + "".join(file.read_text() for file in (DOCKER / "grafana/dashboards").glob("*.json"))
    named = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for name in re.findall(r"asyncrl_(?:learner|rollout)_[a-z0-9_]+", texts)
    }
    table = {metric.name for metric in (*LEARNER, *ROLLOUT)}
    assert len(named) > 80
    assert named - table == set()


def test_dashboards_show_one_run_and_alerts_keep_the_runs_apart() -> None:
    for file in (DOCKER / "grafana/dashboards").glob("*.json"):
        board = json.loads(file.read_text())
        assert [variable["name"] for variable in board["templating"]["list"]] == ["run"]
        name = r"(?:asyncrl_(?:learner|rollout)_[a-z0-9_]+|process_start_time_seconds)"
        for expression in re.findall(r'"expr": "(.*)"', file.read_text()):
            rest = re.sub(name + r'\{run=\\"\$run\\"', "", expression)
            assert not re.search(name, rest), expression
    for rule in _rules():  # an aggregation over series of services must not be over runs
        assert not re.findall(r"\b(?:sum|avg|min|max|count)\s*\((?:\w+\()*asyncrl_", rule["expr"]), rule["alert"]


def test_what_has_a_healthy_range_is_coloured() -> None:
    boards = [json.loads(file.read_text()) for file in (DOCKER / "grafana/dashboards").glob("*.json")]
    coloured = {
        panel["title"]: [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]
        for board in boards
        for panel in board["panels"]
        if "thresholds" in panel.get("fieldConfig", {}).get("defaults", {})
    }
    assert len(coloured) >= 12
    assert coloured["Ledger residual"] == [None, 0, 1]
    assert coloured["Entropy per token"] == [None, THRESHOLDS["EntropyCollapse"].value]


def test_each_alert_names_its_line_of_the_runbook() -> None:
    for rule in _rules():
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert anchor == rule["alert"].lower()
        assert f'<a id="{anchor}"></a>' in (ROOT / page).read_text()


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_what_the_services_show_is_clean_to_prometheus_and_names_the_run() -> None:
    run = 'runs/of {"odd"} names'
    for table, service in ((LEARNER, "learner"), (ROLLOUT, "rollout")):
        metrics = MetricSet(table, service, run)
        metrics.before_scrape(lambda: None)
        for metric in table:
            if metric.labels:
                metrics[metric.name].labels(**dict.fromkeys(metric.labels, "x"))
        port = metrics.serve("127.0.0.1", 0)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            shown = answer.read()
        metrics.close()
        done = subprocess.run(
            [str(PROMTOOL), "check", "metrics"], input=shown, capture_output=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")
        series = [s for family in text_string_to_metric_families(shown.decode()) for s in family.samples]
        assert len(series) > len(table)
        assert {s.labels["run"] for s in series} == {run}


def test_what_moves_once_a_step_is_not_shown_over_seconds() -> None:
    """With steps of two minutes, a rate over Grafana's window of four scrapes is 0, or a spike."""
    boards = "".join(file.read_text() for file in (DOCKER / "grafana/dashboards").glob("*.json"))
    counted = r"\w+_(?:bucket|sum|count)|(?:tokens|trajectories|groups_consumed)_total"
    windows = {
        name: set(re.findall(rf"{name}[^\[\]]*\[([^\]]+)\]", boards))
        for name in re.findall(rf"asyncrl_learner_(?:{counted})", boards)
    }
    assert len(windows) > 10
    assert {window for found in windows.values() for window in found} <= {"10m", "15m"}


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_each_alert_fires_when_it_should_and_is_quiet_in_a_healthy_run() -> None:
    tests = yaml.safe_load(RULE_TESTS.read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test.get("alert_rule_test", ()) if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in _rules()}
    for what in (
        ["check", "rules", "--lint=all", "--lint-fatal", str(RULES)],
        ["check", "config", str(DOCKER / "prometheus" / "prometheus.yml")],
        ["test", "rules", str(RULE_TESTS)],
    ):
        done = subprocess.run([str(PROMTOOL), *what], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
