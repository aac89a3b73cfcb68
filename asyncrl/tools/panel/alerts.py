"""What should worry somebody who looks at a run: the conditions of docker/prometheus/alerts.yml, seen from its files.

Where those have to hold for some minutes, these have to hold in the mean of the last steps. What only Prometheus sees
is missing: who answers a scrape, how fast a disk fills, the shared memory of the learner's machine.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.telemetry.environment import read_starts
from asyncrl.telemetry.limits import LIMITS, STARVES_AT_BOUND, has_fallen, longest_step_s
from asyncrl.tools.panel.run_snapshot import Story

STEPS = 10
"""Over which a condition has to hold."""
LONG = 30
"""The same of what is normal for a while."""
SILENT_S = LIMITS["LearnerSilent"].value + LIMITS["LearnerSilent"].hold_s
SMALL_DISK_BYTES = LIMITS["DiskFilling"].value


def alerts(story: Story) -> dict[str, str]:
    """In words, the gravest first; none of a run that has ended."""
    if story.has_ended:
        return {}
    return {name: words for name, condition in CONDITIONS.items() if (words := condition(story))}


def _limit(alert: str) -> float:
    return LIMITS[alert].value


def _ledger_residual(story: Story) -> str:
    groups = story.latest.get("ledger_residual")
    return f"{groups} groups are in no state of the ledger: samples were lost or counted twice" if groups else ""


def _learner_silent(story: Story) -> str:
    silent_s = time.time() - story.status.get("time", time.time())
    return f"the learner has said nothing for {silent_s:.0f} s" if silent_s > SILENT_S else ""


def _no_progress(story: Story) -> str:
    """While it answers. An evaluation has deadlines of its own."""
    if story.status.get("phase") != "training" or _learner_silent(story):
        return ""
    began = max([story.since, *(start.get("time", 0.0) for start in read_starts(story.run_dir))])
    steps = [step for step in story.steps if step.get("time", 0.0) > began and step.get("step_s") is not None]
    usual_s = sum(step["step_s"] for step in steps) / len(steps) if steps else None
    waited_s = time.time() - (steps[-1]["time"] if steps else began)
    return f"no step for {waited_s / 60:.0f} min" if began and waited_s > longest_step_s(usual_s) else ""


def _no_server(story: Story) -> str:
    alone = story.status.get("phase") == "training" and story.status.get("servers") == []
    return "no rollout server is connected: nothing is sampled" if alone else ""


def _not_a_number(story: Story) -> str:
    # RunRecorder writes what is not finite as null.
    bad = [name for name in ("loss", "grad_norm") if name in story.latest and story.latest[name] is None]
    return f"{' and '.join(bad)} of step {story.latest.get('step')}: not a number" if bad else ""


def _staleness_at_bound(story: Story) -> str:
    """While the learner waits. Servers that are ahead of it fill its buffer to the bound, too, and nothing is wrong."""
    mean, bound = story.mean("staleness/mean", STEPS), story.latest.get("staleness/bound")
    idle = story.mean("idle/learner", STEPS)
    if mean is None or idle is None or not bound:
        return ""
    slow = mean > _limit("StalenessAtBound") * bound and idle > STARVES_AT_BOUND
    return "tokens are as stale as they may be, and the learner waits: servers are too slow" if slow else ""


def _ess(story: Story) -> str:
    ess = _below(story, "ess", "EffectiveSampleSizeCollapse")
    return "" if ess is None else f"effective sample size {ess:.0%}: a few tokens decide the gradient"


def _mismatch_kl(story: Story) -> str:
    nats = _above(story, "mismatch_kl_k3", "MismatchKl")
    return "" if nats is None else f"learner and engine disagree: {nats:.3f} nats per token"


def _entropy(story: Story) -> str:
    nats = _below(story, "entropy", "EntropyCollapse")
    return "" if nats is None else f"entropy {nats:.3f} nats per token: hardly any exploration"


def _below(story: Story, key: str, alert: str) -> float | None:
    """The mean of the last steps, if it is."""
    mean = story.mean(key, STEPS)
    return mean if mean is not None and mean < _limit(alert) else None


def _above(story: Story, key: str, alert: str, steps: int = STEPS) -> float | None:
    mean = story.mean(key, steps)
    return mean if mean is not None and mean > _limit(alert) else None


def _reward_hacking(story: Story) -> str:
    scored = [evaluation for evaluation in story.evaluations if evaluation.get("accuracy") is not None]
    if not scored:
        return ""
    best, last = max(scored, key=lambda evaluation: evaluation["accuracy"]), scored[-1]
    rows = last.get("rows", 0) - last.get("errors", 0)
    rises = _slope([reward for step, reward in story.rewards if step > best.get("step", 0)]) > 0
    if not rises or rows < 1 or not has_fallen(best["accuracy"], last["accuracy"], rows):
        return ""
    return f"held-out fell by {best['accuracy'] - last['accuracy']:.2f} while reward rises: look at samples"


def _slope(values: Sequence[float]) -> float:
    """Of the least-squares line, but for a factor."""
    middle = (len(values) - 1) / 2
    return sum((place - middle) * value for place, value in enumerate(values))


def _rewards_fail(story: Story) -> str:
    rows = [sum(_rows(step).values()) for step in story.steps[-STEPS:]]
    failed = [_rows(step).get("rows/error", 0.0) for step in story.steps[-STEPS:]]
    return "more than one trajectory in twenty fails" if sum(failed) > _limit("RewardsFail") * sum(rows) else ""


def _rows(step: dict[str, Any]) -> dict[str, float]:
    """Trajectories by status."""
    return {name: count for name, count in step.items() if name.startswith("rows/") and count is not None}


def _starves(story: Story) -> str:
    idle = _above(story, "idle/learner", "LearnerStarves", LONG)
    return "" if idle is None else f"the learner waits {idle:.0%} of its time: add rollout servers"


def _disk(story: Story) -> str:
    free = shutil.disk_usage(story.run_dir).free if story.run_dir.exists() else SMALL_DISK_BYTES
    return f"the disk of the run directory has {free / 1e9:.1f} GB left" if free < SMALL_DISK_BYTES else ""


CONDITIONS: dict[str, Callable[[Story], str]] = {
    "NotANumber": _not_a_number,
    "LedgerResidual": _ledger_residual,
    "LearnerSilent": _learner_silent,
    "NoProgress": _no_progress,
    "NoRolloutServer": _no_server,
    "DiskFilling": _disk,
    "RewardHacking": _reward_hacking,
    "EffectiveSampleSizeCollapse": _ess,
    "MismatchKl": _mismatch_kl,
    "EntropyCollapse": _entropy,
    "RewardsFail": _rewards_fail,
    "StalenessAtBound": _staleness_at_bound,
    "LearnerStarves": _starves,
}
"""By the name of the Prometheus alert."""
