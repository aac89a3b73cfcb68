"""Faults of a run that a report finds; it draws its lines where the alerts do."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.telemetry.jsonl import read_lines
from asyncrl.telemetry.wasted_steps import FEW_GROUPS, LEARNS_NOTHING
from asyncrl_plugins.viewer.panel.console import Console
from asyncrl_plugins.viewer.panel.panel import RunPanel
from asyncrl_plugins.viewer.panel.run_snapshot import RunSnapshot
from asyncrl_plugins.viewer.recorded_run.alert_thresholds import (
    FIRST_STEP_S,
    STANDARD_ERRORS,
    STARVES_AT_BOUND,
    THRESHOLDS,
    USUAL_STEPS,
)
from asyncrl_plugins.viewer.recorded_run.run import RecordedRun
from asyncrl_plugins.viewer.report.charts import charts_of_run
from asyncrl_plugins.viewer.report.reading import read_run
from asyncrl_plugins.viewer.report.verdict import all_findings, learned, verdict
from tests.rigs import made_up_run as made

ALERTS = Path(__file__).parents[3] / "docker" / "prometheus" / "alerts.yml"
SECONDS = {"s": 1, "m": 60, "h": 3600}
Change = Callable[[int], dict[str, Any]]


def run_with(folder: Path, change: Change = lambda number: {}, **more: Any) -> RecordedRun:
    return read_run(made.make_run(folder / "run", change=change, **more))


def found(run: RecordedRun) -> dict[str, tuple[str, str]]:
    """Level and value by what was found."""
    return {finding.what: (finding.level, finding.value) for finding in all_findings(run)}


def test_a_healthy_run_has_no_findings(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    assert all_findings(run) == []
    assert verdict(run, [])[0] == "good"


def alerting_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def test_the_limits_are_those_of_the_alerts() -> None:
    rules = {rule["alert"]: rule for rule in alerting_rules()}
    of_processes = {"NoLearner", "RolloutServerSilent", "RolloutServerLost", "Restarting", "SharedMemorySmall"}
    at_servers = {"NoRolloutServer", "TrajectoriesSuspended"}
    unlimited = {"RunStopped", "NotANumber", *at_servers, *of_processes}
    assert set(rules) == THRESHOLDS.keys() | unlimited, "an alert is new: add it to THRESHOLDS and CHECKS"
    for name, limit in THRESHOLDS.items():
        expression, wait = rules[name]["expr"], rules[name].get("for", "0s")
        numbers = [float(number) for number in re.findall(r"(?:[<>*,]|!=) (\d[\d.e]*)", expression)]
        assert limit.value in numbers, f"{name}: {limit.value} is not in {expression}"
        assert limit.hold_s == int(wait[:-1]) * SECONDS[wait[-1]], f"{name}: for {wait}"
    assert f"idle_ratio > {STARVES_AT_BOUND}" in rules["StalenessAtBound"]["expr"]
    assert f"> {STANDARD_ERRORS:g} * sqrt(" in rules["RewardHacking"]["expr"]
    assert f"clamp_min({USUAL_STEPS:g} * asyncrl_learner_step_seconds_sum" in rules["NoProgress"]["expr"]
    assert f"last_step_age_seconds > {FIRST_STEP_S:g} unless" in rules["NoProgress"]["expr"]


def test_failing_rewards_are_told_with_what_the_newest_says(tmp_path: Path) -> None:
    run = run_with(tmp_path, sick("rows/error", 4.0))
    run.status["unscored"] = "reward_exception: the judge is away"
    assert found(run)["Rewards fail"][1].endswith("(error 84): reward_exception: the judge is away")


def test_lost_environments_are_no_failing_rewards(tmp_path: Path) -> None:
    """They have a status of their own among the errors, and a rate that the alert knows."""
    lost = {"rows/error": 4.0, "env/error_rate": 0.25, "env/errors/timeout": 3.0, "env/errors/died": 1.0}
    run = run_with(tmp_path, lambda number: lost if 20 <= number <= 40 else {})
    assert list(found(run)) == ["The environment fails"]
    level, value = found(run)["The environment fails"]
    assert level == "warning"
    assert value == "above 5.0% of the trajectories in steps 20 to 40; highest 25% (died 21, timeout 63)"


def sick(key: str, value: Any, first: int = 20, last: int = 40) -> Change:
    return lambda number: {key: value} if first <= number <= last else {}


@pytest.mark.parametrize(
    ("change", "level", "what", "value"),
    [
        (sick("entropy", 0.01), "warning", "Entropy collapsed", r"steps 20 to 40; lowest 0\.01"),
        (sick("ess", 0.3), "warning", "The effective sample size collapsed", r"steps 20 to 40; lowest 30%"),
        (
            sick("mismatch_kl_k3", 0.2),
            "warning",
            "The policy drifts from its samples",
            r"^[\d.]+ versions old at learner\.optim\.lr=1e-06: above 0\.05 nats per token in .*; highest 0\.2$",
        ),
        (
            lambda number: {"mismatch_kl_k3": 0.2, "staleness_0/mismatch_kl_k3": 0.01, "staleness/mean": 1.0},
            "warning",
            "The policy drifts from its samples",
            r"^1 versions old",
        ),
        (
            lambda number: {"mismatch_kl_k3": 0.2, "staleness_0/mismatch_kl_k3": 0.1},
            "warning",
            "Learner and engine disagree",
            r"highest 0\.1$",
        ),
        (
            lambda number: {"mismatch_kl_k3": 0.2, "staleness/mean": 0.0},
            "warning",
            "Learner and engine disagree",
            r"highest 0\.2$",
        ),
        (sick("staleness/mean", 1.9), "warning", "Samples are as stale as they may be", r"of at most 2 versions"),
        (sick("ledger_residual", 1, 7, 8), "critical", "The ledger does not balance", r"1 groups, first at step 7"),
        (sick("loss", None, 5, 5), "critical", "The loss was not a number", r"1 step, first 5"),
        (sick("grad_norm", None, 5, 6), "critical", "The gradient norm was not a number", r"2 steps, first 5"),
        (sick("rows/error", 4.0), "warning", "Rewards fail", r"21% of the trajectories \(error 84\)"),
        (sick("idle/learner", 0.95), "info", "The learner waits for groups", r"80% of its time in steps 20 to 40"),
        (sick("idle/rollout", 0.95, 1), "info", "The rollout servers are idle", r"95% of their time"),
        (sick("rows/truncated", 9.0), "info", "Many completions hit the length limit", r"37%"),
        (
            lambda number: {"rows/truncated": 9.0, "env/ends/turns": 8.0, "env/ends/tokens": 1.0},
            "info",
            "Many trajectories end at a limit of the environment",
            r"53% \(turns 320, tokens 40\)",
        ),
        (
            sick("mask_fraction", 1.0),
            "warning",
            "Steps taught nothing, all their tokens were masked",
            r"21 of 40 steps, the last of them 40",
        ),
        (sick("zero_variance_groups", 3.0), "warning", "Most groups teach nothing", r"75% of the groups"),
    ],
)
def test_what_is_wrong_is_found(tmp_path: Path, change: Change, level: str, what: str, value: str) -> None:
    run = run_with(tmp_path, change)
    assert list(found(run)) == [what]
    assert found(run)[what][0] == level
    assert re.search(value, found(run)[what][1]), found(run)[what][1]
    assert all(finding.advice for finding in all_findings(run))


def test_a_moment_beyond_a_limit_is_no_finding_unless_it_lasts_as_long_as_the_alert_waits(tmp_path: Path) -> None:
    assert found(run_with(tmp_path / "a", sick("ess", 0.0, 20, 22))) == {}
    slow = run_with(tmp_path / "b", lambda n: {"time": made.BEGAN + 400.0 * n, **sick("ess", 0.1, 20, 21)(n)})
    assert "The effective sample size collapsed" in found(slow), "2 of 40 steps, but 400 s"


def test_reward_that_rises_while_held_out_accuracy_falls(tmp_path: Path) -> None:
    rising = run_with(tmp_path / "a", accuracy=(0.4, 0.7, 0.5))
    assert found(rising)["Reward rises while held-out accuracy falls"][1] == (
        "held-out accuracy 0.700 at step 20, 0.500 at step 40, over 50 rows"
    )
    falling = run_with(tmp_path / "b", lambda number: {"reward/mean": 1 - number / 100}, accuracy=(0.4, 0.7, 0.5))
    assert list(found(falling)) == ["The reward in training fell"]
    by_chance = run_with(tmp_path / "c", accuracy=(0.4, 0.7, 0.6))
    assert found(by_chance) == {}, "of 50 rows, 5 fewer are right"
    assert found(run_with(tmp_path / "d", accuracy=(0.4, 1.5, 1.2))) != {}, "an accuracy that is no share"


def test_evaluations_by_another_reward_are_not_compared(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    before = evaluated(tmp_path, (0.9, 0.5, 0.49), change=lambda n: {})
    assert "The held-out accuracy fell" in found(before)
    records = read_lines(folder / "evaluations.jsonl")
    made.lines(
        folder / "evaluations.jsonl", [record | {"scoring_changes": int(n > 0)} for n, record in enumerate(records)]
    )
    after = read_run(folder)
    assert found(after)["Rewards or held-out rows changed"] == ("info", "after the evaluation of step 0")
    assert not any("held-out accuracy fell" in name for name in found(after))
    assert "held-out accuracy is within noise: 0.500" in learned(after)


def test_steps_by_another_reward_are_not_compared(tmp_path: Path) -> None:
    """One that gives less: from step 21 on 0.1 in place of 0.9."""

    def changed(number: int, **more: float) -> dict[str, float]:
        return {"reward/mean": (0.9 if number <= 20 else 0.1) + 0.001 * number, **more}

    assert "The reward in training fell" in found(run_with(tmp_path / "a", changed))
    marked = run_with(tmp_path / "b", lambda n: changed(n, **({"input_changes": 1.0} if n > 20 else {})))
    assert found(marked)["Rows or rewards changed (--accept-changes)"] == ("info", "from step 21 on")
    assert "The reward in training fell" not in found(marked)
    assert "since step 21" in learned(marked)
    (reward,) = [drawn for drawn in charts_of_run(marked)[0][1] if drawn["title"] == "Reward"]
    assert len(reward["changes"]) == 1


def test_the_panel_of_a_resumed_run_is_not_warned_of_what_was_before_it(tmp_path: Path) -> None:
    status = {"phase": "training", "servers": [{}], "time": time.time() + 60}
    made.make_run(tmp_path / "run", accuracy=(0.9, 0.5), change=sick("ess", 0.0), status=status)
    for since, warns in ((0.0, True), (time.time(), False)):
        panel = RunSnapshot(tmp_path / "run", since)
        panel.refresh()
        assert ("The effective sample size collapsed" in panel.warnings()) == warns


def evaluated(folder: Path, accuracies: tuple[float, ...], rows: int = 400, **more: Any) -> RecordedRun:
    run = made.make_run(folder / "run", accuracy=accuracies, **more)
    records = read_lines(run / "evaluations.jsonl")
    made.lines(run / "evaluations.jsonl", [record | {"rows": rows} for record in records])
    return read_run(run)


def test_a_report_says_first_whether_the_run_learned(tmp_path: Path) -> None:
    def said(run: RecordedRun) -> str:
        return verdict(run, all_findings(run))[1]

    rose = said(evaluated(tmp_path / "a", (0.4, 0.5, 0.6)))
    assert rose.startswith(
        "It learned: held-out accuracy rose from 0.400 ± 0.024 to 0.600 ± 0.024 (steps 0 and 40); "
        "reward in training rose from 0.502 ± 0.001 to 0.538 ± 0.001 (the first and the last 4 steps). Healthy: "
    )
    fell = evaluated(tmp_path / "b", (0.775, 0.75, 0.7), change=lambda n: {"reward/mean": 0.8 - n / 1000})
    assert said(fell).startswith("It got worse: held-out accuracy fell from 0.775 ± 0.021 to 0.700 ± 0.023 (steps 0 ")
    assert "reward in training fell from" in said(fell)
    assert "Healthy" not in said(fell)
    assert verdict(fell, all_findings(fell))[0] == "warning"
    assert found(fell)["The held-out accuracy fell"][0] == "warning"
    few_rows = said(evaluated(tmp_path / "c", (0.775, 0.7), rows=40))
    assert few_rows.startswith(
        "It is not shown to have learned: held-out accuracy is within noise: 0.775 ± 0.066 to 0.7"
    )
    flat = said(evaluated(tmp_path / "d", (0.5, 0.51), change=lambda n: {"reward/mean": 0.5 + 0.1 * (n % 2)}))
    assert "held-out accuracy is within noise" in flat
    assert "reward in training is within noise" in flat
    assert "Healthy" in flat, "nothing is wrong with it, and nothing was learned"
    never = said(evaluated(tmp_path / "e", ()))
    assert never.startswith("Whether it learned is not known, since held-out rows were not scored at two steps: reward")
    assert "reward in training rose" in never


def test_a_recorded_standard_error_counts_and_few_steps_say_nothing(tmp_path: Path) -> None:
    run = made.make_run(tmp_path / "run", steps=4, accuracy=())
    scores = {"rows": 10, "errors": 0, "accuracy_error": 0.01, "reward": 0.5, "reward_error": 0.2}
    made.lines(run / "evaluations.jsonl", [{"step": s, "accuracy": a, **scores} for s, a in ((0, 0.5), (4, 0.6))])
    assert learned(read_run(run)) == (
        "It learned: held-out accuracy rose from 0.500 ± 0.010 to 0.600 ± 0.010 (steps 0 and 4); "
        "held-out reward is within noise: 0.500 ± 0.200 to 0.500 ± 0.200 (steps 0 and 4)."
    )
    (run / "evaluations.jsonl").write_text("")
    assert learned(read_run(run)) == "Whether it learned is not known: there are too few steps and evaluations."


def test_a_learner_that_speaks_and_makes_no_step_is_found(tmp_path: Path) -> None:
    now = time.time()
    at = lambda since: lambda number: {"time": now - since - made.STEP_S * (40 - number)}  # noqa: E731
    status = {"phase": "training", "time": now}
    stuck = found(run_with(tmp_path / "a", at(1000), status=status))
    assert stuck == {"No step is made": ("critical", "none for 16 min 40 s, while the learner answers")}
    assert found(run_with(tmp_path / "b", at(500), status=status)) == {}
    assert found(run_with(tmp_path / "c", at(1000), status=status | {"phase": "evaluating"})) == {}
    silent = found(run_with(tmp_path / "d", at(1000), status=status | {"time": now - 300}))
    assert list(silent) == ["The learner fell silent"]


def test_a_learner_that_is_never_idle_needs_no_more_servers(tmp_path: Path) -> None:
    at_bound = {"staleness/mean": 2.0, "idle/learner": 0.01}
    (finding,) = all_findings(run_with(tmp_path / "a", lambda number: at_bound))
    assert "servers are ahead" in finding.advice
    assert finding.level == "info", "no alert fires"
    (finding,) = all_findings(run_with(tmp_path / "b", lambda number: at_bound | {"idle/learner": 0.3}))
    assert "add servers" in finding.advice
    assert finding.level == "warning"


def test_how_a_run_ended_is_a_finding(tmp_path: Path) -> None:
    silent = run_with(tmp_path / "a", status={"phase": "training"})
    assert found(silent)["The learner fell silent"][0] == "critical"
    live = run_with(tmp_path / "b", status={"phase": "training", "time": time.time(), "servers": []})
    assert "The learner fell silent" not in found(live)
    assert found(live)["No rollout server is connected"][0] == "critical"
    failed = run_with(tmp_path / "c", status={"phase": "failed", "waiting_for": "waited 600 s for groups"})
    assert found(failed) == {"The learner failed": ("critical", "waited 600 s for groups")}
    level, sentence = verdict(failed, all_findings(failed))
    assert level == "critical"
    assert sentence.endswith(" Not healthy: the learner failed.")


def test_restarts_and_errors_are_told(tmp_path: Path) -> None:
    run = made.make_run(tmp_path / "run", status={"errors": {"bad_hash": 3, "KeyError": 10}})
    starts = [{"time": made.BEGAN + 100.0 * i, "step": 10 * i} for i in range(6)]
    (run / "environment.json").write_text(json.dumps({"starts": starts}))
    told = found(read_run(run))
    assert told["It was started again"] == ("warning", "5 restarts of the learner, after steps 10, 20, 30, 40, 50")
    assert told["Errors were counted"] == ("info", "KeyError 10, bad_hash 3")
    assert list(found(run_with(tmp_path, accuracy=()))) == ["Nothing was held out"]


def same(number: int, groups: int = 8) -> dict[str, Any]:
    """A step whose groups have no spread."""
    return {"groups": float(groups), "zero_variance_groups": float(groups), "teaching_groups": 0.0, "grad_norm": 0.0}


@pytest.mark.parametrize(
    ("steps", "change", "fires"),
    [
        (3, same, True),
        (40, same, True),
        (3, lambda n: same(n) | ({"zero_variance_groups": 7.0, "teaching_groups": 1.0} if n == 2 else {}), False),
        (40, lambda n: same(n) | ({"zero_variance_groups": 7.0, "teaching_groups": 1.0} if n == 30 else {}), False),
        (2, lambda n: same(n, 32), False),
        (3, lambda n: same(n, 7), False),
        (6, lambda n: same(n, 4), True),
        (6, lambda n: {"zero_variance_groups": 4.0}, True),  # as an earlier version has recorded it
        (6, lambda n: {"zero_variance_groups": 3.0 if n == 5 else 4.0}, False),
        (3, lambda n: same(n) | {"teaching_groups": 8.0}, False),  # credit that compares no rows of a group
    ],
)
def test_a_run_whose_groups_have_no_spread_is_not_called_healthy(
    tmp_path: Path, steps: int, change: Change, fires: bool
) -> None:
    """As soon as three steps, of at least 24 groups, have none; one group in 24 that has some is enough."""
    status = {"phase": "training", "servers": [{}], "time": time.time()}
    run = run_with(tmp_path, lambda n: {**change(n), "time": time.time()}, steps=steps, status=status)
    tone, sentence = verdict(run, all_findings(run))
    panel = RunSnapshot(tmp_path / "run")
    panel.refresh()
    said = panel.warnings().get(LEARNS_NOTHING, "")
    assert (tone == "critical", bool(said)) == (fires, fires)
    if fires:
        causes = "the run learns nothing (answer format? reward? stop tokens? length?)"
        assert f"Not healthy: {causes}" in sentence
        console = Console(width=110, height=60, force_terminal=True)
        with console.capture() as shown:
            console.print(RunPanel(panel))
        assert "The run learns nothing (answer format? reward? stop tokens?" in shown.get()


@pytest.mark.parametrize(("left", "fires"), [(0.14, True), (0.6, False)])
def test_filters_that_slow_a_run_down_are_found_while_it_runs_and_afterwards(
    tmp_path: Path, left: float, fires: bool
) -> None:
    """Steps of 13 s, then of 65 s because most groups are dropped; where most are kept it has another reason."""
    status = {"phase": "training", "servers": [{}], "time": time.time()}
    slow = {"filtered_share": 1 - left, "step_s": 65.0, "dropped/zero_variance": 96.0}
    change = lambda n: {"step_s": 13.0, "time": time.time()} | (slow if n > 20 else {})  # noqa: E731
    findings = found(run_with(tmp_path, change, status=status))
    panel = RunSnapshot(tmp_path / "run")
    panel.refresh()
    warned = panel.warnings().get(FEW_GROUPS, "")
    assert (FEW_GROUPS in findings, bool(warned)) == (fires, fires)
    if fires:
        assert findings[FEW_GROUPS][1].endswith("65 s, 13 s at first (dropped in all: zero_variance 96)")
        assert warned.endswith("14% of groups in the last 3 steps; a step takes 65 s, 13 s at first")
