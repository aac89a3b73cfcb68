"""The checks of a run's health, for a report and the panel. A finding says what is wrong, its value, and what to do.

Thresholds are those of the alerts (asyncrl/telemetry/alert_thresholds.py), with a few more that no alert has. What only
Prometheus sees is missing: which processes answer a scrape, how fast a disk fills, shared memory.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, linear_regression
from typing import Literal, get_args

from asyncrl.telemetry.alert_thresholds import STARVES_AT_BOUND, THRESHOLDS, has_fallen, longest_step_s
from asyncrl.tools.learning import HELD_OUT, TRAINING, courses, learned
from asyncrl.tools.numbers import count, duration, figure, share
from asyncrl.tools.recorded_run import ENDED, Record, RecordedRun, number
from protocol.messages.groups import Limit

SERVERS_IDLE = 0.8
MANY_TRUNCATED = 0.25
MANY_WITHOUT_VARIANCE = 0.5
MANY_RESTARTS = 3
LEAST_STEPS, LEAST_SHARE = 3, 0.1
"""Steps, and share of all steps, beyond a threshold that make a finding even in a run too short for the alert."""

Level = Literal["critical", "warning", "info"]
Show = Callable[[float | None], str]


@dataclass(frozen=True)
class Finding:
    """One problem of a run."""

    level: Level
    what: str
    value: str
    advice: str


def findings(run: RecordedRun) -> list[Finding]:
    """Run every check; the gravest finding comes first."""
    order: list[Level] = ["critical", "warning", "info"]
    return sorted((f for check in CHECKS.values() for f in check(run)), key=lambda finding: order.index(finding.level))


def checks_without_finding(run: RecordedRun) -> list[str]:
    return [name for name, check in CHECKS.items() if not list(check(run))]


def warnings(run: RecordedRun) -> dict[str, str]:
    """Active problems of a running run, by subject."""
    return {f.what: f"{f.what}: {f.value}" for f in findings(run) if f.level != "info" and run.ending not in ENDED}


def verdict(run: RecordedRun, found: list[Finding]) -> tuple[str, str]:
    """Return a word for the colour (critical, warning, good, none), and sentences: whether it learned comes first."""
    if not run.steps and not run.failure:
        return "none", "There is nothing to judge yet: there is no step that could be read."
    for level, opening in (("critical", "Not healthy"), ("warning", "Worth a look")):
        names = [finding.what[0].lower() + finding.what[1:] for finding in found if finding.level == level]
        if names:
            return level, f"{learned(run)} {opening}: {'; '.join(names)}.".lstrip()
    return "good", f"{learned(run)} Healthy: none of {len(CHECKS)} checks found anything that needs attention.".lstrip()


def _stopped(run: RecordedRun) -> Iterator[Finding]:
    if run.failure:
        at = f" after step {run.failure.step}" if run.failure.step is not None else ""
        kind = run.failure.kind.replace("_", " ") if isinstance(run.failure.kind, str) else "failed"
        value = f"{run.failure.service}, {kind}{at}: {run.failure.reason}"
        log = "logs/learner.log" if run.failure.service == "learner" else "the rollout server's log"
        advice = f"Mend the cause, then continue with --resume; {log} has the moment before."
        yield Finding("critical", "The run stopped", value, advice)
    elif run.ending == "failed":
        value = str(run.status.get("waiting_for") or "no reason was saved")
        yield Finding("critical", "The learner failed", value, "Look at logs/learner.log; --resume continues.")


def _silent(run: RecordedRun) -> Iterator[Finding]:
    spoke = number(run.status.get("time"))
    if run.ending in ENDED or spoke is None:
        return
    silent_s, limit = time.time() - spoke, THRESHOLDS["LearnerSilent"]
    if silent_s > limit.value + limit.hold_s:
        advice = "If it is meant to be running, look at logs/learner.log; --resume continues from what is journaled."
        at = f"silent for {duration(silent_s)} while {run.ending or 'starting'}"
        yield Finding("critical", "The learner fell silent", at, advice)


def _no_progress(run: RecordedRun) -> Iterator[Finding]:
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
        yield Finding("critical", "No step is made", value, advice)


def _no_server(run: RecordedRun) -> Iterator[Finding]:
    if run.ending == "training" and run.status.get("servers") == []:
        advice = "Start one, or look at its log: it says why the learner does not welcome it."
        yield Finding("critical", "No rollout server is connected", "nothing is sampled", advice)


def _restarts(run: RecordedRun) -> Iterator[Finding]:
    again = run.starts[1:]
    if again:
        steps = ", ".join(str(start.get("step", "?")) for start in again[-8:])
        value = f"{count(len(again), 'restart')} of the learner, after steps {steps}"
        advice = "Nothing is lost by a restart; logs/learner.log says what each cost and why."
        yield Finding("warning" if len(again) > MANY_RESTARTS else "info", "It was started again", value, advice)


def _disk(run: RecordedRun) -> Iterator[Finding]:
    free = shutil.disk_usage(run.path).free if run.path.exists() else float("inf")
    if run.ending != "finished" and free < THRESHOLDS["DiskFilling"].value:
        advice = "Make room: old runs, trainer.save_limit, trainer.journal_limit_mib."
        yield Finding("warning", "The disk is nearly full", f"{free / 2**30:.2g} GiB free", advice)


def _residual(run: RecordedRun) -> Iterator[Finding]:
    limit = THRESHOLDS["LedgerResidual"].value
    wrong = [step for step in run.steps if abs(number(step.get("ledger_residual")) or 0.0) > limit]
    if wrong:
        value = f"{figure(number(wrong[-1]['ledger_residual']))} groups, first at step {wrong[0]['step']:.0f}"
        advice = "Samples were lost or counted twice. Keep the run directory: this is a defect to report."
        yield Finding("critical", "The ledger does not balance", value, advice)


def _not_a_number(run: RecordedRun) -> Iterator[Finding]:
    for key, name in (("loss", "The loss"), ("grad_norm", "The gradient norm")):
        gone = [int(step) for step, value in run.points(key) if value is None]
        if gone:
            value = f"{count(len(gone), 'step')}, first {gone[0]:,}"
            advice = "Lower learner.optim.lr, set a correction, or look at that step's samples; the step is wasted."
            yield Finding("critical", f"{name} was not a number", value, advice)


def _errors(run: RecordedRun) -> Iterator[Finding]:
    kinds = run.status.get("errors")
    counted = {str(kind): n for kind, n in kinds.items() if number(n)} if isinstance(kinds, dict) else {}
    if counted:
        value = ", ".join(f"{kind} {n:,}" for kind, n in sorted(counted.items(), key=lambda item: -item[1])[:8])
        advice = "Unusable messages, refused groups or failed tickets; logs/learner.log names the first of each."
        yield Finding("info", "Errors were counted", value, advice)


def _got_worse(run: RecordedRun) -> Iterator[Finding]:
    for course in courses(run):
        if course.name in (HELD_OUT, TRAINING) and course.direction == "fell":
            value = f"{course.start} to {course.end} ({course.where})"
            advice = "Lower learner.optim.lr or the staleness, look at the reward's samples; go back to a checkpoint."
            yield Finding("warning", f"The {course.name} fell", value, advice)


def _reward_hacking(run: RecordedRun) -> Iterator[Finding]:
    scored = [(e, value) for e in run.evaluations if (value := number(e.get("accuracy"))) is not None]
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
        yield Finding("warning", "Reward rises while held-out accuracy falls", value, advice)


def _not_evaluated(run: RecordedRun) -> Iterator[Finding]:
    if run.steps and not run.evaluations:
        advice = "Set data.val_files and evaluation.every_steps: training reward alone cannot tell learning from luck."
        yield Finding("info", "Nothing was held out", "no evaluation", advice)


def _zero_variance(run: RecordedRun) -> Iterator[Finding]:
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
        yield Finding("info", "Most groups teach nothing", f"{share(part)} of the groups in the last fifth", advice)


def _truncated(run: RecordedRun) -> Iterator[Finding]:
    rows = _rows(run)
    part = rows.get("truncated", 0.0) / (sum(rows.values()) or 1.0)
    if part <= MANY_TRUNCATED:
        return
    ends = {limit: sum(run.values(f"env/ends/{limit}")) for limit in get_args(Limit) if limit}
    if limits := sorted((name for name, count in ends.items() if count), key=lambda name: -ends[name]):
        value = f"{share(part)} ({', '.join(f'{name} {ends[name]:,.0f}' for name in limits)})"
        advice = f"Raise environment.limits.{limits[0]}, or reward an early end."
        yield Finding("info", "Many trajectories end at a limit of the environment", value, advice)
        return
    advice = "Raise data.max_response_length, or reward brevity: what is cut off cannot be right."
    yield Finding("info", "Many completions hit the length limit", share(part), advice)


def _all_masked(run: RecordedRun) -> Iterator[Finding]:
    masked = [step for step in run.steps if step.get("mask_fraction") == 1.0]
    if masked:
        advice = "The correction's masks drop all of it: mask_fraction_... in metrics.jsonl says which."
        if any(step.get("mask_fraction_over_limit") == 1.0 for step in masked):
            advice = (
                "All its trajectories ended at a limit, and environment.over_limit=mask leaves these out. Raise "
                "environment.limits, or score them with over_limit=score."
            )
        value = f"{len(masked):,} of {count(len(run.steps), 'step')}, the last of them {masked[-1].get('step')}"
        yield Finding("warning", "Steps taught nothing, all their tokens were masked", value, advice)


def _rewards_fail(run: RecordedRun) -> Iterator[Finding]:
    rows = _rows(run)
    bad = {kind: rows.get(kind, 0.0) for kind in ("error", "timed_out")}
    bad["error"] -= sum(_environment_errors(run).values())
    part = sum(bad.values()) / (sum(rows.values()) or 1.0)
    if part > THRESHOLDS["RewardsFail"].value:
        value = ", ".join(f"{kind.replace('_', ' ')} {n:,.0f}" for kind, n in bad.items() if n)
        reason = f": {why}" if (why := run.status.get("unscored")) else ""
        advice = "These rows are left out of the loss. The error samples below have the messages."
        yield Finding("warning", "Rewards fail", f"{share(part)} of the trajectories ({value}){reason}", advice)


def _environment_fails(run: RecordedRun) -> Iterator[Finding]:
    if value := _beyond(run, "EnvironmentFails", "env/error_rate", " of the trajectories", share):
        kinds = ", ".join(f"{kind} {n:,.0f}" for kind, n in _environment_errors(run).items())
        advice = "They are left out of the loss. The rollout server's log and the error samples below say why."
        yield Finding("warning", "The environment fails", f"{value} ({kinds})", advice)


def _environment_errors(run: RecordedRun) -> dict[str, float]:
    """Count the trajectories of the whole run that their environment lost, by kind."""
    prefix = "env/errors/"
    return {key.removeprefix(prefix): sum(run.values(key)) for key in sorted(run.keys) if key.startswith(prefix)}


def _rows(run: RecordedRun) -> dict[str, float]:
    """Count the trajectories of the whole run by status."""
    return {key.removeprefix("rows/"): sum(run.values(key)) for key in run.keys if key.startswith("rows/")}


def _staleness(run: RecordedRun) -> Iterator[Finding]:
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
        yield Finding("info" if is_ahead else "warning", "Samples are as stale as they may be", value, advice)


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


def _beyond(run: RecordedRun, alert: str, key: str, unit: str, show: Show = figure, *, is_low: bool = False) -> str:
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


def _entropy(run: RecordedRun) -> Iterator[Finding]:
    if value := _beyond(run, "EntropyCollapse", "entropy", " nats per token", is_low=True):
        advice = "The policy hardly explores: raise clip_ratio_high or entropy_coeff, lower the learning rate, or stop."
        yield Finding("warning", "Entropy collapsed", value, advice)


def _effective_sample_size(run: RecordedRun) -> Iterator[Finding]:
    if value := _beyond(run, "EffectiveSampleSizeCollapse", "ess", "", share, is_low=True):
        advice = "A few tokens decide the gradient: lower learner.max_staleness or the learning rate."
        yield Finding("warning", "The effective sample size collapsed", value, advice)


def _mismatch(run: RecordedRun) -> Iterator[Finding]:
    if value := _beyond(run, "MismatchKl", "mismatch_kl_k3", " nats per token"):
        advice = "If it is high at staleness 0, run asyncrl doctor: they disagree. Else lower max_staleness."
        if run.quantization:
            advice = f"At staleness 0 it is the price of {run.quantization} weights. Else lower max_staleness."
        yield Finding("warning", "Learner and engine disagree", value, advice)


def _learner_starves(run: RecordedRun) -> Iterator[Finding]:
    value = _beyond(run, "LearnerStarves", "idle/learner", " of its time", share)
    if run.setting("trainer.mode") != "sync" and value:
        yield Finding("info", "The learner waits for groups", value, "Add rollout servers, or shorten completions.")


def _servers_idle(run: RecordedRun) -> Iterator[Finding]:
    idle = run.mean("idle/rollout")
    if run.setting("trainer.mode") != "sync" and idle is not None and idle > SERVERS_IDLE:
        advice = "The learner is the slow side: give it more of the machine, or run fewer servers."
        yield Finding("info", "The rollout servers are idle", f"{share(idle)} of their time", advice)


CHECKS: dict[str, Callable[[RecordedRun], Iterator[Finding]]] = {
    "its end": _stopped,
    "silence": _silent,
    "progress": _no_progress,
    "rollout servers": _no_server,
    "the ledger": _residual,
    "non-finite numbers": _not_a_number,
    "what was learned": _got_worse,
    "reward against held-out accuracy": _reward_hacking,
    "entropy": _entropy,
    "effective sample size": _effective_sample_size,
    "mismatch of learner and engine": _mismatch,
    "staleness": _staleness,
    "failing rewards": _rewards_fail,
    "failing environments": _environment_fails,
    "disk space": _disk,
    "restarts": _restarts,
    "errors": _errors,
    "a starving learner": _learner_starves,
    "idle servers": _servers_idle,
    "cut-off completions": _truncated,
    "masked steps": _all_masked,
    "groups that teach nothing": _zero_variance,
    "evaluation": _not_evaluated,
}
"""Checks by the name of their subject."""
