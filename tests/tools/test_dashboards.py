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

from learner.reporting.metrics import METRICS as LEARNER
from rollout_server.metrics import METRICS as ROLLOUT

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


def test_every_panel_asks_the_provisioned_data_source() -> None:
    (source,) = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    boards = [json.loads(file.read_text()) for file in (DOCKER / "grafana/dashboards").glob("*.json")]
    panels = [panel for board in boards for panel in board["panels"] if panel["type"] != "row"]
    assert len(panels) > 50
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
    assert all(panel["targets"] for panel in panels)
    undescribed = {panel["title"] for panel in panels if not panel["description"]}
    assert undescribed == {"Up", "Restarts in an hour", "Alerts", "Alerts that fire"}, "of Prometheus' own metrics"


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
    recorded = RULES.read_text().count("- record: ")
    assert f"{len(_rules()) + recorded} rules found" in done


MUTANTS = [
    ("RolloutServerSilent", " or asyncrl_rollout_pulse_age_seconds > 30", ""),
    ("NotANumber", "|grad_norm", ""),
    ("RewardHacking", '(deriv(asyncrl_learner_reward{component="mean"}[1h]) > 0)', "(asyncrl_learner_reward > -9)"),
    ("RewardHacking", "> 2 * sqrt(", "> 0 * sqrt("),
    ("StalenessAtBound", " and asyncrl_learner_idle_ratio > 0.2", ""),
    ("LearnerSilent", ' or 0 * max by (instance) (up{job="learner"} == 1)', ""),
    ("LearnerSilent", " and max(max_over_time(asyncrl_rollout_learner_silence_seconds[5m])) > 30", ""),
    ("NoProgress", 'seconds_total{for="evaluation"}', 'seconds_total{for="groups"}'),
    ("EntropyCollapse", "entropy < 0.02 and asyncrl_learner_steps_total > 0", "entropy < 0.02"),
    ("NoRolloutServer", "asyncrl_learner_servers offset 10m == 0", "asyncrl_learner_servers == 0"),
    ("DiskFilling", " and asyncrl_learner_disk_free_bytes < 0.2 * asyncrl_learner_disk_size_bytes", ""),
]
"""An alert, a part of its rule (or of what it rests on), and a replacement that the rule tests have to notice."""


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
@pytest.mark.parametrize(("alert", "part", "instead"), MUTANTS)
def test_a_rule_that_lacks_a_part_is_noticed(alert: str, part: str, instead: str, tmp_path: Path) -> None:
    rules = yaml.safe_load(RULES.read_text())
    hit = 0
    for group in rules["groups"]:
        for rule in group["rules"]:
            hit += part in rule["expr"]
            rule["expr"] = rule["expr"].replace(part, instead)
    assert hit == 1, "the rule is written in another way now"
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(rules))
    tests = yaml.safe_load(RULE_TESTS.read_text()) | {"rule_files": ["alerts.yml"]}
    tests["tests"] = [test for test in tests["tests"] if alert in str(test) or "count(ALERTS" in str(test)]
    (tmp_path / "test.yml").write_text(yaml.safe_dump(tests))
    assert PROMTOOL is not None
    command = [PROMTOOL, "test", "rules", str(tmp_path / "test.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "parse error" not in done.stdout + done.stderr


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
