"""Steps that teach nothing, and steps for which filters have most of the samples thrown away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

LEARNS_NOTHING = "The run learns nothing (answer format? reward? stop tokens? length?)"
USUAL_CAUSES = (
    "Read completions (samples.jsonl): are answers in the form that the reward reads, and do they end (stop tokens) "
    "before data.max_response_length? `asyncrl doctor` tries the reward"
)
LEAST_STEPS, LEAST_GROUPS = 3, 24
"""Steps and groups without spread that are no chance any more."""
FEW_GROUPS = "Filters leave few groups (rows too easy or too hard? policy certain of wrong answers?)"
WAYS_OUT = (
    "Look at reward/mean and entropy: near the best reward the data is learned, so stop or bring harder rows; far from "
    "it lower learner.optim.lr, raise batch.group_size, or choose rows (algorithm.greso, algorithm.pass_rate). Without "
    "algorithm.filters steps are as fast as before, with fewer groups that teach"
)
LEAST_LEFT, LEAST_SLOWDOWN = 0.5, 3.0
"""Share of groups that filters leave, and seconds of a step as a multiple of those at first, that are no reason to
say so."""


def without_spread(steps: Sequence[Mapping[str, Any]], per_step: float = 0) -> str:
    """Describe these steps where no group of them had rewards that differ, so that nothing could be learned; empty
    where one had, or they are too few to tell. `per_step`: groups of a step that does not record their number."""
    groups = judged = 0.0
    for step in steps:
        number, alike = step.get("groups", per_step), step.get("zero_variance_groups")
        taught = step.get("teaching_groups")
        if not isinstance(number, int | float) or not isinstance(alike, int | float) or not number:
            continue
        if taught if isinstance(taught, int | float) else alike < number:
            return ""
        groups, judged = groups + number, judged + 1
    if judged < LEAST_STEPS or groups < LEAST_GROUPS:
        return ""
    return f"the rewards of each group of {judged:.0f} steps ({groups:.0f} groups) are all the same"


def few_groups_left(first: Sequence[Mapping[str, Any]], newest: Sequence[Mapping[str, Any]]) -> str:
    """Describe the LEAST_STEPS newest steps where filters dropped most groups and a step takes several times as long
    as the first ones of the run; empty where that is not so, or the steps are too few to tell."""
    before, now = [step for step in first if _has_pace(step)], [step for step in newest if _has_pace(step)]
    before, now = before[:LEAST_STEPS], now[-LEAST_STEPS:]
    if min(len(before), len(now)) < LEAST_STEPS or before[-1]["step"] >= now[0]["step"]:
        return ""
    was_s, is_s = (median(step["step_s"] for step in part) for part in (before, now))
    left = 1 - median(step.get("filtered_share", 0.0) for step in now)
    if left >= LEAST_LEFT or is_s < LEAST_SLOWDOWN * was_s:
        return ""
    return f"{left:.0%} of groups in the last {LEAST_STEPS} steps; a step takes {is_s:.3g} s, {was_s:.3g} s at first"


def _has_pace(step: Mapping[str, Any]) -> bool:
    """False for a step that was made again from the journal, which waits for nothing, and for damaged records."""
    numbers = (step.get("step"), step.get("step_s"), step.get("filtered_share", 0.0))
    return step.get("publish_bytes") != 0 and all(isinstance(number, int | float) for number in numbers)
