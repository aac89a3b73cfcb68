"""Grade each token of a completion: a string with one character per token for each way of colouring.

Terminal and web pages only choose colours for these characters.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from asyncrl_plugins.viewer.samples.model import TrajectoryDetail

Colouring = Literal["diff", "version", "mask", "logprob"]
COLOURINGS: tuple[Colouring, ...] = get_args(Colouring)
TITLES: dict[Colouring, str] = {
    "diff": "log-prob difference, learner minus engine",
    "version": "policy version that sampled it",
    "mask": "part in the loss",
    "logprob": "probability when it was sampled",
}
DIFFERENCES = (0.02, 0.1, 0.3, 1.0)
"""Thresholds of differences in nats. Noise between two engines in bfloat16 is mostly below the first."""
PROBABILITIES = (0.9, 0.5, 0.1, 0.01)
MOST_BEHIND = 4
LESS, MORE = "abcd", "1234"
UNKNOWN, UNSAMPLED, MASKED = "?", "u", "x"

LEGENDS: dict[Colouring, tuple[tuple[str, str], ...]] = {
    "diff": (
        *((LESS[i], f"≤ −{DIFFERENCES[i]:g}") for i in reversed(range(len(DIFFERENCES)))),
        ("0", f"within ±{DIFFERENCES[0]:g}"),
        *((MORE[i], f"≥ {DIFFERENCES[i]:g}") for i in range(len(DIFFERENCES))),
        (UNSAMPLED, "not sampled"),
        (UNKNOWN, "not measured"),
    ),
    "version": (
        ("0", "the version that consumed it"),
        *((str(i), f"{i} behind") for i in range(1, MOST_BEHIND)),
        (str(MOST_BEHIND), f"{MOST_BEHIND} or more"),
        (UNSAMPLED, "not sampled"),
    ),
    "mask": (("0", "in the loss"), (UNSAMPLED, "not sampled"), (MASKED, "taken out by the correction")),
    "logprob": (
        ("0", f"above {PROBABILITIES[0]:.0%}"),
        *((str(i + 1), f"{share:.0%} or less") for i, share in enumerate(PROBABILITIES)),
        (UNSAMPLED, "not sampled"),
    ),
}


def token_levels(trajectory: TrajectoryDetail) -> dict[Colouring, str]:
    """Return a string of T characters for each colouring; LEGENDS says what they mean."""
    engine, learner = trajectory.logprobs.tolist(), trajectory.learner_logprobs
    differences = [math.nan] * len(engine) if learner is None else (learner - trajectory.logprobs).tolist()
    behind = (trajectory.consumed_at - trajectory.versions).clip(0, MOST_BEHIND).tolist()
    levels: dict[Colouring, list[str]] = {
        "diff": [_difference(value) for value in differences],
        "version": [str(value) for value in behind],
        "mask": [MASKED if gone else "0" for gone in trajectory.masked],
        "logprob": [str(sum(value <= math.log(share) for share in PROBABILITIES)) for value in engine],
    }
    sampled = trajectory.is_sampled.tolist()
    return {
        name: "".join(level if is_sampled else UNSAMPLED for level, is_sampled in zip(column, sampled, strict=True))
        for name, column in levels.items()
    }


def telling_colouring(trajectories: Iterable[Mapping[Colouring, str]]) -> Colouring:
    """Return the colouring to open a group with: differences where one is beyond noise, else probabilities.

    At staleness 0 engine and learner agree to the noise, and nothing would be coloured by what they differ in.
    """
    seen = set("".join(levels["diff"] for levels in trajectories))
    return "diff" if seen & {*LESS, *MORE} else "logprob"


def _difference(value: float) -> str:
    if math.isnan(value):
        return UNKNOWN
    level = bisect_right(DIFFERENCES, abs(value))
    return "0" if level == 0 else (LESS if value < 0 else MORE)[level - 1]
