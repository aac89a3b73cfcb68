"""What is wrong with a run, each with its value and what to do. The limits are those of the alerts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from asyncrl.telemetry.alert_thresholds import STARVES_AT_BOUND, THRESHOLDS, has_fallen
from asyncrl.tools.report import ending
from asyncrl.tools.report.alert_durations import long_enough, longest
from asyncrl.tools.report.finding import Finding, Level
from asyncrl.tools.report.limits import SERVERS_IDLE, TRUNCATED, ZERO_VARIANCE
from asyncrl.tools.report.markup import count, figure, share
from asyncrl.tools.report.run import Record, Run, number
from asyncrl.tools.report.series import slope


def findings(run: Run) -> list[Finding]:
    """The gravest first."""
    found = [finding for check in CHECKS.values() for finding in check(run)]
    order: list[Level] = ["critical", "warning", "info"]
    return sorted(found, key=lambda finding: order.index(finding.level))


def quiet(run: Run) -> list[str]:
    """What was looked at, and is as it should be."""
    return [name for name, check in CHECKS.items() if not list(check(run))]


def verdict(run: Run, found: list[Finding]) -> tuple[str, str]:
    """A word for its colour (critical, warning, good, none), and a sentence."""
    if not run.steps and not run.failure:
        return "none", "There is nothing to judge yet: there is no step that could be read."
    grave = [finding for finding in found if finding.level == "critical"]
    warnings = [finding for finding in found if finding.level == "warning"]
    if grave:
        return "critical", f"Not healthy: {_names(grave)}."
    if warnings:
        return "warning", f"Worth a look: {_names(warnings)}."
    return "good", f"Healthy: none of {len(CHECKS)} checks found anything that needs attention."


def _names(found: list[Finding]) -> str:
    return "; ".join(finding.what[0].lower() + finding.what[1:] for finding in found)


# --- is the account right ------------------------------------------------------------------------


def _residual(run: Run) -> Iterator[Finding]:
    wrong = [
        step
        for step in run.steps
        if abs(number(step.get("ledger_residual")) or 0.0) > THRESHOLDS["LedgerResidual"].value
    ]
    if wrong:
        value = f"{figure(number(wrong[-1]['ledger_residual']))} groups, first at step {wrong[0]['step']:.0f}"
        advice = "Samples were lost or counted twice. Keep the run directory: this is a defect to report."
        yield Finding("critical", "The ledger does not balance", value, advice)


def _not_a_number(run: Run) -> Iterator[Finding]:
    for key, name in (("loss", "The loss"), ("grad_norm", "The gradient norm")):
        gone = [int(step) for step, value in run.points(key) if value is None]
        if gone:
            value = f"{count(len(gone), 'step')}, first {gone[0]:,}"
            advice = "Lower learner.optim.lr, set a correction, or look at that step's samples; the step is wasted."
            yield Finding("critical", f"{name} was not a number", value, advice)


def _errors(run: Run) -> Iterator[Finding]:
    kinds = run.status.get("errors")
    counted = {str(kind): n for kind, n in kinds.items() if number(n)} if isinstance(kinds, dict) else {}
    if counted:
        value = ", ".join(f"{kind} {n:,}" for kind, n in sorted(counted.items(), key=lambda item: -item[1])[:8])
        advice = "Unusable messages, refused groups or failed tickets; logs/learner.log names the first of each."
        yield Finding("info", "Errors were counted", value, advice)


# --- does it learn -------------------------------------------------------------------------------


def _reward_hacking(run: Run) -> Iterator[Finding]:
    scored = [(e, value) for e in run.evaluations if (value := number(e.get("accuracy"))) is not None]
    if len(scored) < 2:
        return
    (at_best, best), (at_last, last) = max(scored, key=lambda item: item[1]), scored[-1]
    rising = slope([point for point in run.points("reward/mean") if point[0] >= at_best["step"]])
    rows = (number(at_last.get("rows")) or 0.0) - (number(at_last.get("errors")) or 0.0)
    if rising is not None and rising > 0 and rows >= 1 and has_fallen(best, last, rows):
        value = (
            f"held-out accuracy {best:.3f} at step {at_best['step']:.0f}, {last:.3f} at step {at_last['step']:.0f},"
            f" over {rows:.0f} rows"
        )
        advice = "It may exploit the reward: read samples below, and go back to the better checkpoint."
        yield Finding("warning", "Reward rises while held-out accuracy falls", value, advice)


def _entropy(run: Run) -> Iterator[Finding]:
    limit = THRESHOLDS["EntropyCollapse"]
    stretch = longest(run, _below("entropy", limit.value))
    if stretch and long_enough(stretch, limit.hold_s):
        value = f"below {limit.value:g} nats per token in {stretch}; lowest {figure(min(run.values('entropy')))}"
        advice = "The policy hardly explores: raise clip_ratio_high or entropy_coeff, lower the learning rate, or stop."
        yield Finding("warning", "Entropy collapsed", value, advice)


def _not_evaluated(run: Run) -> Iterator[Finding]:
    if run.steps and not run.evaluations:
        advice = "Set data.val_files and evaluation.every_steps: training reward alone cannot tell learning from luck."
        yield Finding("info", "Nothing was held out", "no evaluation", advice)


def _zero_variance(run: Run) -> Iterator[Finding]:
    per_step = number(run.setting("batch.prompts_per_step"))
    groups = run.values("zero_variance_groups")
    if not per_step or not groups:
        return
    recent = groups[-max(1, len(groups) // 5) :]
    part = sum(recent) / len(recent) / per_step
    if part > ZERO_VARIANCE:
        advice = (
            "Their completions all scored the same. Leave out rows that are too easy or too hard, or raise group_size."
        )
        yield Finding("info", "Most groups teach nothing", f"{share(part)} of the groups in the last fifth", advice)


def _truncated(run: Run) -> Iterator[Finding]:
    rows = _rows(run)
    total = sum(rows.values())
    part = rows.get("truncated", 0.0) / total if total else 0.0
    if part > TRUNCATED:
        advice = "Raise data.max_response_length, or reward brevity: what is cut off cannot be right."
        yield Finding("info", "Many completions hit the length limit", share(part), advice)


def _rewards_fail(run: Run) -> Iterator[Finding]:
    rows = _rows(run)
    total = sum(rows.values())
    bad = {kind: rows.get(kind, 0.0) for kind in ("error", "timed_out")}
    part = sum(bad.values()) / total if total else 0.0
    if part > THRESHOLDS["RewardsFail"].value:
        value = ", ".join(f"{kind.replace('_', ' ')} {n:,.0f}" for kind, n in bad.items() if n)
        advice = "These rows are left out of the loss. The error samples below have the messages."
        yield Finding("warning", "Rewards fail", f"{share(part)} of the trajectories ({value})", advice)


# --- is it on policy enough ----------------------------------------------------------------------


def _effective_sample_size(run: Run) -> Iterator[Finding]:
    limit = THRESHOLDS["EffectiveSampleSizeCollapse"]
    stretch = longest(run, _below("ess", limit.value))
    if stretch and long_enough(stretch, limit.hold_s):
        value = f"below {share(limit.value)} in {stretch}; lowest {share(min(run.values('ess')))}"
        advice = "A few tokens decide the gradient: lower learner.max_staleness or the learning rate."
        yield Finding("warning", "The effective sample size collapsed", value, advice)


def _mismatch(run: Run) -> Iterator[Finding]:
    limit = THRESHOLDS["MismatchKl"]
    stretch = longest(run, _above("mismatch_kl_k3", limit.value))
    if stretch and long_enough(stretch, limit.hold_s):
        value = (
            f"above {limit.value:g} nats per token in {stretch}; highest {figure(max(run.values('mismatch_kl_k3')))}"
        )
        advice = (
            "If it is high at staleness 0, engine and learner disagree: run asyncrl doctor. Else lower max_staleness."
        )
        yield Finding("warning", "Learner and engine disagree", value, advice)


def _staleness(run: Run) -> Iterator[Finding]:
    limit = THRESHOLDS["StalenessAtBound"]

    def at_bound(step: Record) -> bool | None:
        mean, bound = number(step.get("staleness/mean")), number(step.get("staleness/bound"))
        return None if mean is None or not bound else mean > limit.value * bound

    stretch = longest(run, at_bound)
    if stretch and long_enough(stretch, limit.hold_s):
        idle = _mean(run.values("idle/learner"))
        is_ahead = idle is not None and idle <= STARVES_AT_BOUND
        if is_ahead:
            advice = (
                f"The learner waits only {share(idle)} of its time: the servers are ahead of it. "
                "A lower learner.max_staleness, or fewer servers, costs no speed."
            )
        else:
            advice = "Servers are too slow, or the bound is too low: add servers, or raise learner.max_staleness."
        mean, bound = _mean(run.values("staleness/mean")), run.last("staleness/bound")
        value = f"mean {figure(mean)} of at most {figure(bound)} versions; at the bound in {stretch}"
        level = "info" if is_ahead else "warning"
        yield Finding(level, "Samples are as stale as they may be", value, advice)


# --- does anybody wait ---------------------------------------------------------------------------


def _learner_starves(run: Run) -> Iterator[Finding]:
    limit = THRESHOLDS["LearnerStarves"]
    stretch = longest(run, _above("idle/learner", limit.value))
    if run.setting("trainer.mode") != "sync" and stretch and long_enough(stretch, limit.hold_s):
        value = f"more than {share(limit.value)} of its time in {stretch}"
        yield Finding("info", "The learner waits for groups", value, "Add rollout servers, or shorten completions.")


def _servers_idle(run: Run) -> Iterator[Finding]:
    idle = _mean(run.values("idle/rollout"))
    if run.setting("trainer.mode") != "sync" and idle is not None and idle > SERVERS_IDLE:
        advice = "The learner is the slow side: give it more of the machine, or run fewer servers."
        yield Finding("info", "The rollout servers are idle", f"{share(idle)} of their time", advice)


CHECKS: dict[str, Callable[[Run], Iterator[Finding]]] = {
    "its end": ending.stopped,
    "silence": ending.silent,
    "progress": ending.no_progress,
    "the ledger": _residual,
    "numbers that are none": _not_a_number,
    "reward against held-out accuracy": _reward_hacking,
    "entropy": _entropy,
    "effective sample size": _effective_sample_size,
    "mismatch of learner and engine": _mismatch,
    "staleness": _staleness,
    "failing rewards": _rewards_fail,
    "disk space": ending.disk,
    "restarts": ending.restarts,
    "errors": _errors,
    "a starving learner": _learner_starves,
    "idle servers": _servers_idle,
    "cut-off completions": _truncated,
    "groups that teach nothing": _zero_variance,
    "evaluation": _not_evaluated,
}
"""By what they look at."""


def _below(key: str, limit: float):
    return lambda step: None if (value := number(step.get(key))) is None else value < limit


def _above(key: str, limit: float):
    return lambda step: None if (value := number(step.get(key))) is None else value > limit


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _rows(run: Run) -> dict[str, float]:
    """Trajectories of the whole run by status."""
    return {key.removeprefix("rows/"): sum(run.values(key)) for key in run.keys if key.startswith("rows/")}
