"""Grafana's dashboards and Prometheus' alerts: made of metrics that exist, and each alert fires when it should."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from learner.metrics import METRICS as LEARNER
from rollout_server.metrics import METRICS as ROLLOUT

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
PROMTOOL = shutil.which("promtool")
RULES = DOCKER / "prometheus" / "alerts.yml"
RULE_TESTS = ROOT / "tests" / "alerts.test.yml"


def _rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_dashboards_are_those_that_grafanas_own_types_write() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed")
    made = runpy.run_path(str(DOCKER / "grafana" / "make_dashboards.py"))
    written = {file.stem: file.read_text() for file in (DOCKER / "grafana" / "dashboards").glob("*.json")}
    assert {uid: made["dashboard"](uid) for uid in made["DASHBOARDS"]} == written


def test_every_panel_asks_the_provisioned_data_source() -> None:
    (source,) = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    boards = [json.loads(file.read_text()) for file in (DOCKER / "grafana/dashboards").glob("*.json")]
    panels = [panel for board in boards for panel in board["panels"] if panel["type"] != "row"]
    assert len(panels) > 50
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
    assert all(panel["targets"] for panel in panels)
    undescribed = {panel["title"] for panel in panels if not panel["description"]}
    assert undescribed == {"Up", "Restarts in an hour"}, "of Prometheus' own metrics"


def test_dashboards_and_alerts_know_only_metrics_of_the_tables() -> None:
    texts = RULES.read_text() + "".join(file.read_text() for file in (DOCKER / "grafana/dashboards").glob("*.json"))
    named = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for name in re.findall(r"asyncrl_(?:learner|rollout)_[a-z0-9_]+", texts)
    }
    table = {metric.name for metric in (*LEARNER, *ROLLOUT)}
    assert len(named) > 80
    assert named - table == set()


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_accepts_the_configuration() -> None:
    done = _promtool("check", "config", str(DOCKER / "prometheus" / "prometheus.yml"))
    assert f"{len(_rules())} rules found" in done


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_each_alert_fires_when_it_should_and_is_quiet_in_a_healthy_run() -> None:
    cases = [
        case for test in yaml.safe_load(RULE_TESTS.read_text())["tests"] for case in test.get("alert_rule_test", ())
    ]
    fired = {case["alertname"] for case in cases if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in _rules()}
    assert "SUCCESS" in _promtool("test", "rules", str(RULE_TESTS))


def test_every_alert_says_how_bad_it_is_and_what_to_do_and_is_in_the_documentation() -> None:
    guide = (ROOT / "docs" / "troubleshooting.md").read_text()
    for rule in _rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
        assert len(rule["annotations"]["summary"]) > 20, rule["alert"]
        assert f"`{rule['alert']}`" in guide, rule["alert"]


def _promtool(*arguments: str) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
