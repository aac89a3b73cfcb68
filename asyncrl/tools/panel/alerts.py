"""Warnings about a run: the conditions of docker/prometheus/alerts.yml, seen from its files.

Where those have to hold for some minutes, these have to hold in the mean of the last steps. What only Prometheus sees
is missing: which processes answer a scrape, how fast a disk fills, the shared memory of the learner's machine.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from statistics import linear_regression

from asyncrl.telemetry.alert_thresholds import STARVES_AT_BOUND, THRESHOLDS, has_fallen, longest_step_s
from asyncrl.telemetry.environment import read_starts
from asyncrl.tools.panel.run_snapshot import RunSnapshot

STEPS = 10
"""Steps over which a condition has to hold."""
LONG = 30
"""The same for what is normal for a while."""


def alerts(run: RunSnapshot) -> dict[str, str]:
    """Messages by name of the Prometheus alert, the gravest first; none for a run that has ended."""
    if run.has_ended:
        return {}
    return {name: message for name, condition in CONDITIONS.items() if (message := condition(run))}


def _threshold(alert: str) -> float:
    return THRESHOLDS[alert].value


def _not_a_number(run: RunSnapshot) -> str:
    # RunRecorder writes what is not finite as null.
    bad = [name for name in ("loss", "grad_norm") if name in run.latest and run.latest[name] is None]
    return f"{' and '.join(bad)} of step {run.latest.get('step')}: not a number" if bad else ""


def _ledger_residual(run: RunSnapshot) -> str:
    groups = run.latest.get("ledger_residual")
    return f"{groups} groups are in no state of the ledger: samples were lost or counted twice" if groups else ""


def _learner_silent(run: RunSnapshot) -> str:
    silent_s, threshold = time.time() - run.status.get("time", time.time()), THRESHOLDS["LearnerSilent"]
    is_silent = silent_s > threshold.value + threshold.hold_s
    return f"the learner has said nothing for {silent_s:.0f} s" if is_silent else ""


def _no_progress(run: RunSnapshot) -> str:
    """No step for long, of a learner that is not silent. An evaluation has deadlines of its own."""
    if run.status.get("phase") != "training" or _learner_silent(run):
        return ""
    began = max([run.since, *(start.get("time", 0.0) for start in read_starts(run.run_dir))])
    steps = [step for step in run.steps if step.get("time", 0.0) > began and step.get("step_s") is not None]
    usual_s = sum(step["step_s"] for step in steps) / len(steps) if steps else None
    waited_s = time.time() - (steps[-1]["time"] if steps else began)
    return f"no step for {waited_s / 60:.0f} min" if began and waited_s > longest_step_s(usual_s) else ""


def _no_server(run: RunSnapshot) -> str:
    is_alone = run.status.get("phase") == "training" and run.status.get("servers") == []
    return "no rollout server is connected: nothing is sampled" if is_alone else ""


def _disk(run: RunSnapshot) -> str:
    free = shutil.disk_usage(run.run_dir).free if run.run_dir.exists() else float("inf")
    return f"the disk of the run directory has {free / 1e9:.1f} GB left" if free < _threshold("DiskFilling") else ""


def _reward_hacking(run: RunSnapshot) -> str:
    scored = [evaluation for evaluation in run.evaluations if evaluation.get("accuracy") is not None]
    if not scored:
        return ""
    best, last = max(scored, key=lambda evaluation: evaluation["accuracy"]), scored[-1]
    rows = last.get("rows", 0) - last.get("errors", 0)
    later = [reward for step, reward in run.rewards if step > best.get("step", 0)]
    rises = len(later) > 1 and linear_regression(range(len(later)), later).slope > 0
    if not rises or rows < 1 or not has_fallen(best["accuracy"], last["accuracy"], rows):
        return ""
    return f"held-out fell by {best['accuracy'] - last['accuracy']:.2f} while reward rises: look at samples"


def _rewards_fail(run: RunSnapshot) -> str:
    counts = [(name, n) for step in run.steps[-STEPS:] for name, n in step.items() if name.startswith("rows/") and n]
    failed = sum(n for name, n in counts if name == "rows/error")
    fail_often = failed > _threshold("RewardsFail") * sum(n for _, n in counts)
    return "more than one trajectory in twenty fails" if fail_often else ""


def _staleness_at_bound(run: RunSnapshot) -> str:
    """Tokens at their bound while the learner waits. Servers ahead of it fill its buffer, too: no fault."""
    mean, bound = run.mean("staleness/mean", STEPS), run.latest.get("staleness/bound")
    idle = run.mean("idle/learner", STEPS)
    if mean is None or idle is None or not bound:
        return ""
    slow = mean > _threshold("StalenessAtBound") * bound and idle > STARVES_AT_BOUND
    return "tokens are as stale as they may be, and the learner waits: servers are too slow" if slow else ""


def _mean(alert: str, key: str, message: str, run: RunSnapshot, *, is_low: bool = False, steps: int = STEPS) -> str:
    """The message if the mean of a metric is beyond the alert's threshold: above it, or below it with `is_low`."""
    mean = run.mean(key, steps)
    if mean is None or mean == _threshold(alert) or (mean < _threshold(alert)) is not is_low:
        return ""
    return message.format(mean)


LOW_ESS = "effective sample size {:.0%}: a few tokens decide the gradient"
DISAGREE = "learner and engine disagree: {:.3f} nats per token"
LOW_ENTROPY = "entropy {:.3f} nats per token: hardly any exploration"
STARVES = "the learner waits {:.0%} of its time: add rollout servers"
CONDITIONS: dict[str, Callable[[RunSnapshot], str]] = {
    "NotANumber": _not_a_number,
    "LedgerResidual": _ledger_residual,
    "LearnerSilent": _learner_silent,
    "NoProgress": _no_progress,
    "NoRolloutServer": _no_server,
    "DiskFilling": _disk,
    "RewardHacking": _reward_hacking,
    "EffectiveSampleSizeCollapse": partial(_mean, "EffectiveSampleSizeCollapse", "ess", LOW_ESS, is_low=True),
    "MismatchKl": partial(_mean, "MismatchKl", "mismatch_kl_k3", DISAGREE),
    "EntropyCollapse": partial(_mean, "EntropyCollapse", "entropy", LOW_ENTROPY, is_low=True),
    "RewardsFail": _rewards_fail,
    "StalenessAtBound": _staleness_at_bound,
    "LearnerStarves": partial(_mean, "LearnerStarves", "idle/learner", STARVES, steps=LONG),
}
"""Keys are names of Prometheus alerts."""
