"""Judgement of a recorded run: whether it learned, and what every check finds.

Beside the core's checks, which the panel shows as warnings, stand those that only inform.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import get_args

from asyncrl.launch.display import scored_alike
from asyncrl_plugins.viewer.numbers import share
from asyncrl_plugins.viewer.recorded_run.findings import (
    CHECKS,
    Check,
    RunFinding,
    describe_excess,
    findings,
    rows_by_status,
)
from asyncrl_plugins.viewer.recorded_run.learning import HELD_OUT, courses
from asyncrl_plugins.viewer.recorded_run.run import RecordedRun, number
from protocol.messages.groups import Limit

SERVERS_IDLE = 0.8
MANY_TRUNCATED = 0.25
MANY_WITHOUT_VARIANCE = 0.5


def all_findings(run: RecordedRun) -> list[RunFinding]:
    """Run every check; the gravest finding comes first."""
    return findings(run, ALL_CHECKS)


def checks_without_finding(run: RecordedRun) -> list[str]:
    return [name for name, check in ALL_CHECKS.items() if not list(check(run))]


def verdict(run: RecordedRun, found: list[RunFinding]) -> tuple[str, str]:
    """Return a word for the colour (critical, warning, good, none), and sentences: whether it learned comes first."""
    if not run.steps and not run.failure:
        return "none", "There is nothing to judge yet: there is no step that could be read."
    for level, opening in (("critical", "Not healthy"), ("warning", "Worth a look")):
        names = [finding.what[0].lower() + finding.what[1:] for finding in found if finding.level == level]
        if names:
            return level, f"{learned(run)} {opening}: {'; '.join(names)}.".lstrip()
    return (
        "good",
        f"{learned(run)} Healthy: none of {len(ALL_CHECKS)} checks found anything that needs attention.".lstrip(),
    )


def learned(run: RecordedRun) -> str:
    """Return sentences that say whether the run learned, or why that is not known; ± is a standard error."""
    known = courses(run)
    held_out = next((course for course in known if course.name == HELD_OUT), None)
    if held_out is not None:
        openings = {"rose": "It learned", "fell": "It got worse", "is within noise": "It is not shown to have learned"}
        opening = openings[held_out.direction]
    elif known:
        opening = "Whether it learned is not known, since held-out rows were not scored at two steps"
    else:
        return "Whether it learned is not known: there are too few steps and evaluations." if run.steps else ""
    return f"{opening}: {'; '.join(map(str, known))}."


def _errors(run: RecordedRun) -> Iterator[RunFinding]:
    kinds = run.status.get("errors")
    counted = {str(kind): n for kind, n in kinds.items() if number(n)} if isinstance(kinds, dict) else {}
    if counted:
        value = ", ".join(f"{kind} {n:,}" for kind, n in sorted(counted.items(), key=lambda item: -item[1])[:8])
        advice = "Unusable messages, refused groups or failed tickets; logs/learner.log names the first of each."
        yield RunFinding("info", "Errors were counted", value, advice)


def _not_evaluated(run: RecordedRun) -> Iterator[RunFinding]:
    if run.steps and not run.evaluations:
        advice = "Set data.val_files and evaluation.every_steps: training reward alone cannot tell learning from luck."
        yield RunFinding("info", "Nothing was held out", "no evaluation", advice)


def _scored_otherwise(run: RecordedRun) -> Iterator[RunFinding]:
    if earlier := run.evaluations[: -len(scored_alike(run.evaluations))]:
        advice = "The verdict compares the later evaluations alone. The curve of held-out accuracy shows both."
        value = f"after the evaluation of step {earlier[-1]['step']:.0f}"
        yield RunFinding("info", "Rewards or held-out rows changed", value, advice)


def _inputs_changed(run: RecordedRun) -> Iterator[RunFinding]:
    if run.changed_at:
        advice = "Steps before and after do not compare. A dashed line marks them in the charts."
        value = f"from step {', '.join(f'{step:.0f}' for step in run.changed_at)} on"
        yield RunFinding("info", "Rows or rewards changed (--accept-changes)", value, advice)


def _zero_variance(run: RecordedRun) -> Iterator[RunFinding]:
    per_step = number(run.setting("batch.prompts_per_step"))
    groups = run.values("zero_variance_groups")
    if not per_step or not groups:
        return
    recent = groups[-max(1, len(groups) // 5) :]
    part = fmean(recent) / per_step
    if part > MANY_WITHOUT_VARIANCE:
        advice = (
            "Their completions all scored the same. Leave out rows that are too easy or too hard, or raise group_size."
        )
        value = f"{share(part)} of the groups in the last fifth"
        yield RunFinding("warning", "Most groups teach nothing", value, advice)


def _truncated(run: RecordedRun) -> Iterator[RunFinding]:
    rows = rows_by_status(run)
    part = rows.get("truncated", 0.0) / (sum(rows.values()) or 1.0)
    if part <= MANY_TRUNCATED:
        return
    ends = {limit: sum(run.values(f"env/ends/{limit}")) for limit in get_args(Limit) if limit}
    if limits := sorted((name for name, count in ends.items() if count), key=lambda name: -ends[name]):
        value = f"{share(part)} ({', '.join(f'{name} {ends[name]:,.0f}' for name in limits)})"
        advice = f"Raise environment.limits.{limits[0]}, or reward an early end."
        yield RunFinding("info", "Many trajectories end at a limit of the environment", value, advice)
        return
    advice = "Raise data.max_response_length, or reward brevity: what is cut off cannot be right."
    yield RunFinding("info", "Many completions hit the length limit", share(part), advice)


def _learner_starves(run: RecordedRun) -> Iterator[RunFinding]:
    value = describe_excess(run, "LearnerStarves", "idle/learner", " of its time", share)
    if run.setting("trainer.mode") != "sync" and value:
        yield RunFinding("info", "The learner waits for groups", value, "Add rollout servers, or shorten completions.")


def _servers_idle(run: RecordedRun) -> Iterator[RunFinding]:
    idle = run.mean("idle/rollout")
    if run.setting("trainer.mode") != "sync" and idle is not None and idle > SERVERS_IDLE:
        advice = "The learner is the slow side: give it more of the machine, or run fewer servers."
        yield RunFinding("info", "The rollout servers are idle", f"{share(idle)} of their time", advice)


ALL_CHECKS: Mapping[str, Check] = {
    **CHECKS,
    "errors": _errors,
    "a starving learner": _learner_starves,
    "idle servers": _servers_idle,
    "cut-off completions": _truncated,
    "groups that teach nothing": _zero_variance,
    "evaluation": _not_evaluated,
    "what scored held-out rows": _scored_otherwise,
    "changes of rows and rewards": _inputs_changed,
}
"""Checks by the name of their subject."""
