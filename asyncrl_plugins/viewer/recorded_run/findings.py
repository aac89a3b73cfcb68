"""The checks of a run's health. A finding says what is wrong, its value, and what to do.

Thresholds are those of the alerts (`alert_thresholds`), with a few more that no alert has. What only Prometheus sees is
missing: which processes answer a scrape, how fast a disk fills, shared memory.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, linear_regression
from typing import Literal

from asyncrl.launch.display import ENDED, scored_alike
from asyncrl.telemetry.wasted_steps import (
    FEW_GROUPS,
    LEARNS_NOTHING,
    USUAL_CAUSES,
    WAYS_OUT,
    few_groups_left,
    without_spread,
)
from asyncrl_plugins.viewer.numbers import count, duration, figure, share
from asyncrl_plugins.viewer.recorded_run.alert_thresholds import (
    STARVES_AT_BOUND,
    THRESHOLDS,
    has_fallen,
    longest_step_s,
)
from asyncrl_plugins.viewer.recorded_run.learning import HELD_OUT, TRAINING, courses
from asyncrl_plugins.viewer.recorded_run.run import Record, RecordedRun, number

MANY_RESTARTS = 3
LEAST_STEPS, LEAST_SHARE = 3, 0.1
"""Steps, and share of all steps, beyond a threshold that make a finding even in a run too short for the alert."""

Level = Literal["critical", "warning", "info"]
Show = Callable[[float | None], str]


@dataclass(frozen=True)
class RunFinding:
    """One problem of a run."""

    level: Level
    what: str
    value: str
    advice: str


Check = Callable[[RecordedRun], Iterator[RunFinding]]


def findings(run: RecordedRun, checks: Mapping[str, Check]) -> list[RunFinding]:
    """Run the checks; the gravest finding comes first."""
    order: list[Level] = ["critical", "warning", "info"]
    return sorted((f for check in checks.values() for f in check(run)), key=lambda finding: order.index(finding.level))


def warnings(run: RecordedRun) -> dict[str, str]:
    """Active problems of a running run, by subject."""
    # `RunProgress.warnings` has these two.
    checks = {name: check for name, check in CHECKS.items() if check not in (_learns_nothing, _few_groups_left)}
    found = [] if run.ending in ENDED else findings(run, checks)
    return {f.what: f"{f.what}: {f.value}" for f in found if f.level != "info"}


def _stopped(run: RecordedRun) -> Iterator[RunFinding]:
    if run.failure:
        at = f" after step {run.failure.step}" if run.failure.step is not None else ""
        kind = run.failure.kind.replace("_", " ") if isinstance(run.failure.kind, str) else "failed"
        value = f"{run.failure.service}, {kind}{at}: {run.failure.reason}"
        log = "logs/learner.log" if run.failure.service == "learner" else "the rollout server's log"
        advice = f"Fix the cause, then continue with --resume; {log} has the moment before."
        yield RunFinding("critical", "The run stopped", value, advice)
    elif run.ending == "failed":
        value = str(run.status.get("waiting_for") or "no reason was saved")
        yield RunFinding("critical", "The learner failed", value, "Look at logs/learner.log; --resume continues.")


def _silent(run: RecordedRun) -> Iterator[RunFinding]:
    spoke = number(run.status.get("time"))
    if run.ending in ENDED or spoke is None:
        return
    silent_s, limit = time.time() - spoke, THRESHOLDS["LearnerSilent"]
    if silent_s > limit.value + limit.hold_s:
        advice = "If it is meant to be running, look at logs/learner.log; --resume continues from what is journaled."
        at = f"silent for {duration(silent_s)} while {run.ending or 'starting'}"
        yield RunFinding("critical", "The learner fell silent", at, advice)


def _no_progress(run: RecordedRun) -> Iterator[RunFinding]:
    """Find a learner that answers but makes no step. An evaluation has deadlines of its own."""
    if run.ending != "training" or list(_silent(run)):
        return
    began = max((t for start in run.starts if (t := number(start.get("time")))), default=0.0)
    steps = [step for step in run.steps if (number(step.get("time")) or 0.0) > began]
    seconds = [s for step in steps if (s := number(step.get("step_s"))) is not None]
    waited_s = time.time() - (steps[-1]["time"] if steps else began)
    if began and waited_s > longest_step_s(fmean(seconds) if seconds else None):
        advice = "status.json says what it waits for, logs/learner.log what was last. Stop it and --resume."
        value = f"none for {duration(waited_s)}, while the learner answers"
        yield RunFinding("critical", "No step is made", value, advice)


def _no_server(run: RecordedRun) -> Iterator[RunFinding]:
    if run.ending == "training" and run.status.get("servers") == []:
        advice = "Start one, or look at its log: it says why the learner does not welcome it."
        yield RunFinding("critical", "No rollout server is connected", "nothing is sampled", advice)


def _restarts(run: RecordedRun) -> Iterator[RunFinding]:
    again = run.starts[1:]
    if again:
        steps = ", ".join(str(start.get("step", "?")) for start in again[-8:])
        value = f"{count(len(again), 'restart')} of the learner, after steps {steps}"
        advice = "Nothing is lost by a restart; logs/learner.log says what each cost and why."
        yield RunFinding("warning" if len(again) > MANY_RESTARTS else "info", "It was started again", value, advice)


def _disk(run: RecordedRun) -> Iterator[RunFinding]:
    free = shutil.disk_usage(run.path).free if run.path.exists() else float("inf")
    if run.ending != "finished" and free < THRESHOLDS["DiskFilling"].value:
        advice = "Make room: old runs, trainer.save_limit, trainer.journal_limit_mib."
        yield RunFinding("warning", "The disk is nearly full", f"{free / 2**30:.2g} GiB free", advice)


def _residual(run: RecordedRun) -> Iterator[RunFinding]:
    limit = THRESHOLDS["LedgerResidual"].value
    wrong = [step for step in run.steps if abs(number(step.get("ledger_residual")) or 0.0) > limit]
    if wrong:
        value = f"{figure(number(wrong[-1]['ledger_residual']))} groups, first at step {wrong[0]['step']:.0f}"
        advice = "Samples were lost or counted twice. Keep the run directory: this is a defect to report."
        yield RunFinding("critical", "The ledger does not balance", value, advice)


def _not_a_number(run: RecordedRun) -> Iterator[RunFinding]:
    for key, name in (("loss", "The loss"), ("grad_norm", "The gradient norm")):
        gone = [int(step) for step, value in run.points(key) if value is None]
        if gone:
            value = f"{count(len(gone), 'step')}, first {gone[0]:,}"
            advice = "Lower learner.optim.lr, set a correction, or look at that step's samples; the step is wasted."
            yield RunFinding("critical", f"{name} was not a number", value, advice)


def _got_worse(run: RecordedRun) -> Iterator[RunFinding]:
    for course in courses(run):
        if course.name in (HELD_OUT, TRAINING) and course.direction == "fell":
            value = f"{course.start} to {course.end} ({course.where})"
            advice = "Lower learner.optim.lr or the staleness, look at the reward's samples; go back to a checkpoint."
            yield RunFinding("warning", f"The {course.name} fell", value, advice)


def _reward_hacking(run: RecordedRun) -> Iterator[RunFinding]:
    scored = [(e, value) for e in scored_alike(run.evaluations) if (value := number(e.get("accuracy"))) is not None]
    if len(scored) < 2:
        return
    (at_best, best), (at_last, last) = max(scored, key=lambda item: item[1]), scored[-1]
    rows = (number(at_last.get("rows")) or 0.0) - (number(at_last.get("errors")) or 0.0)
    if rows < 1 or not has_fallen(best, last, rows):
        return
    later = [(x, y) for x, y in run.rewards if x >= at_best["step"] and y is not None]
    if len({x for x, _ in later}) > 2 and linear_regression(*zip(*later, strict=True)).slope > 0:
        value = (
            f"held-out accuracy {best:.3f} at step {at_best['step']:.0f}, {last:.3f} at step {at_last['step']:.0f},"
            f" over {rows:.0f} rows"
        )
        advice = "It may exploit the reward: read samples below, and go back to the better checkpoint."
        yield RunFinding("warning", "Reward rises while held-out accuracy falls", value, advice)


def _all_masked(run: RecordedRun) -> Iterator[RunFinding]:
    masked = [step for step in run.steps if step.get("mask_fraction") == 1.0]
    if masked:
        advice = "The correction's masks drop all of it: mask_fraction_... in metrics.jsonl says which."
        if any(step.get("mask_fraction_over_limit") == 1.0 for step in masked):
            advice = (
                "All its trajectories ended at a limit, and environment.over_limit=mask leaves these out. Raise "
                "environment.limits, or score them with over_limit=score."
            )
        value = f"{len(masked):,} of {count(len(run.steps), 'step')}, the last of them {masked[-1].get('step')}"
        yield RunFinding("warning", "Steps taught nothing, all their tokens were masked", value, advice)


def _rewards_fail(run: RecordedRun) -> Iterator[RunFinding]:
    rows = rows_by_status(run)
    bad = {kind: rows.get(kind, 0.0) for kind in ("error", "timed_out")}
    bad["error"] -= sum(_environment_errors(run).values())
    part = sum(bad.values()) / (sum(rows.values()) or 1.0)
    if part > THRESHOLDS["RewardsFail"].value:
        value = ", ".join(f"{kind.replace('_', ' ')} {n:,.0f}" for kind, n in bad.items() if n)
        reason = f": {why}" if (why := run.status.get("unscored")) else ""
        advice = "These rows are left out of the loss. The error samples below have the messages."
        yield RunFinding("warning", "Rewards fail", f"{share(part)} of the trajectories ({value}){reason}", advice)


def _environment_fails(run: RecordedRun) -> Iterator[RunFinding]:
    if value := describe_excess(run, "EnvironmentFails", "env/error_rate", " of the trajectories", share):
        kinds = ", ".join(f"{kind} {n:,.0f}" for kind, n in _environment_errors(run).items())
        advice = "They are left out of the loss. The rollout server's log and the error samples below say why."
        yield RunFinding("warning", "The environment fails", f"{value} ({kinds})", advice)


def _environment_errors(run: RecordedRun) -> dict[str, float]:
    """Count the trajectories of the whole run that their environment lost, by kind."""
    prefix = "env/errors/"
    return {key.removeprefix(prefix): sum(run.values(key)) for key in sorted(run.keys) if key.startswith(prefix)}


def rows_by_status(run: RecordedRun) -> dict[str, float]:
    """Count the trajectories of the whole run by status."""
    return {key.removeprefix("rows/"): sum(run.values(key)) for key in run.keys if key.startswith("rows/")}


def _staleness(run: RecordedRun) -> Iterator[RunFinding]:
    limit = THRESHOLDS["StalenessAtBound"]

    def at_bound(step: Record) -> bool | None:
        mean, bound = number(step.get("staleness/mean")), number(step.get("staleness/bound"))
        return None if mean is None or not bound else mean > limit.value * bound

    if steps := _alerting_steps(run, limit.hold_s, at_bound):
        idle = run.mean("idle/learner")
        is_ahead = idle is not None and idle <= STARVES_AT_BOUND
        advice = "Servers are too slow, or the bound is too low: add servers, or raise learner.max_staleness."
        if is_ahead:
            advice = (
                f"The learner waits only {share(idle)} of its time: the servers are ahead of it. "
                "A lower learner.max_staleness, or fewer servers, costs no speed."
            )
        mean, bound = run.mean("staleness/mean"), run.last("staleness/bound")
        value = f"mean {figure(mean)} of at most {figure(bound)} versions; at the bound in {steps}"
        yield RunFinding("info" if is_ahead else "warning", "Samples are as stale as they may be", value, advice)


def _alerting_steps(run: RecordedRun, hold_s: float, crossed: Callable[[Record], bool | None]) -> str:
    """Describe the longest stretch of steps that `crossed` a threshold; empty where no alert would have fired.

    A stretch counts if it lasted as long as the alert waits, or was a good part of the run. `crossed` returns None for
    a step without the value: such a step neither counts nor ends a stretch.
    """
    judged = [step for step in run.steps if crossed(step) is not None]
    steps = max((list(part) for is_crossed, part in groupby(judged, crossed) if is_crossed), key=len, default=[])
    if not steps:
        return ""
    began, ended = number(steps[0].get("time")), number(steps[-1].get("time"))
    is_long = len(steps) > 1 and began is not None and ended is not None and ended - began >= hold_s
    if not is_long and len(steps) < max(LEAST_STEPS, LEAST_SHARE * len(judged)):
        return ""
    first, last = int(steps[0]["step"]), int(steps[-1]["step"])
    return f"steps {first:,} to {last:,}" if first != last else f"step {first:,}"


def describe_excess(
    run: RecordedRun, alert: str, key: str, unit: str, show: Show = figure, *, is_low: bool = False
) -> str:
    """Describe steps where a value crossed an alert's threshold; empty where the alert would not have fired."""
    limit = THRESHOLDS[alert]

    def crossed(step: Record) -> bool | None:
        value = number(step.get(key))
        return None if value is None else value < limit.value if is_low else value > limit.value

    if not (steps := _alerting_steps(run, limit.hold_s, crossed)):
        return ""
    values = run.values(key)
    extreme = f"lowest {show(min(values))}" if is_low else f"highest {show(max(values))}"
    return f"{'below' if is_low else 'above'} {show(limit.value)}{unit} in {steps}; {extreme}"


def _entropy(run: RecordedRun) -> Iterator[RunFinding]:
    if value := describe_excess(run, "EntropyCollapse", "entropy", " nats per token", is_low=True):
        advice = "The policy hardly explores: raise clip_ratio_high or entropy_coeff, lower the learning rate, or stop."
        yield RunFinding("warning", "Entropy collapsed", value, advice)


def _effective_sample_size(run: RecordedRun) -> Iterator[RunFinding]:
    if value := describe_excess(run, "EffectiveSampleSizeCollapse", "ess", "", share, is_low=True):
        advice = "A few tokens decide the gradient: lower learner.max_staleness or the learning rate."
        yield RunFinding("warning", "The effective sample size collapsed", value, advice)


def _mismatch(run: RecordedRun) -> Iterator[RunFinding]:
    """Tell what learner and engine make of the same weights from what the policy has moved since it sampled."""
    key, unit = "mismatch_kl_k3", " nats per token"
    age = run.mean("staleness/mean") or 0.0
    if value := describe_excess(run, "MismatchKl", f"staleness_0/{key}" if age else key, unit):
        advice = "At staleness 0 the policy is the same: run asyncrl doctor (model.dtype, kernels, settings)."
        if run.quantization:
            advice = f"At staleness 0 it is the price of {run.quantization} weights."
        yield RunFinding("warning", "Learner and engine disagree", value, advice)
    elif value := describe_excess(run, "MismatchKl", key, unit):
        speed = f"{figure(age)} versions old at learner.optim.lr={number(run.setting('learner.optim.lr')) or 0:g}"
        advice = "Not a disagreement but its way since it sampled: lower learner.optim.lr or learner.max_staleness."
        yield RunFinding("warning", "The policy drifts from its samples", f"{speed}: {value}", advice)


def _learns_nothing(run: RecordedRun) -> Iterator[RunFinding]:
    if found := without_spread(run.steps, number(run.setting("batch.prompts_per_step")) or 0.0):
        yield RunFinding("critical", LEARNS_NOTHING, found, USUAL_CAUSES)


def _few_groups_left(run: RecordedRun) -> Iterator[RunFinding]:
    if found := few_groups_left(run.steps, run.steps):
        prefix = "dropped/"
        reasons = {key.removeprefix(prefix): run.last(key) or 0.0 for key in run.keys if key.startswith(prefix)}
        counted = ", ".join(f"{reason} {number:,.0f}" for reason, number in reasons.items())
        yield RunFinding("warning", FEW_GROUPS, f"{found} (dropped in all: {counted})", f"{WAYS_OUT}.")


CHECKS: Mapping[str, Check] = {
    "its end": _stopped,
    "silence": _silent,
    "progress": _no_progress,
    "rollout servers": _no_server,
    "the ledger": _residual,
    "non-finite numbers": _not_a_number,
    "what was learned": _got_worse,
    "anything to learn from": _learns_nothing,
    "what filters leave": _few_groups_left,
    "reward against held-out accuracy": _reward_hacking,
    "entropy": _entropy,
    "effective sample size": _effective_sample_size,
    "mismatch of learner and engine": _mismatch,
    "staleness": _staleness,
    "failing rewards": _rewards_fail,
    "failing environments": _environment_fails,
    "disk space": _disk,
    "restarts": _restarts,
    "masked steps": _all_masked,
}
"""Checks that may end in a warning, by the name of their subject."""
