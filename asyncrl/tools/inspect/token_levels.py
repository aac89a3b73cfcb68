"""Grade each token of a completion: a string with one character per token for each way of colouring.

Terminal and web pages only choose colours for these characters.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal, get_args

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


def token_levels(
    *,
    logprobs: Sequence[float],
    learner_logprobs: Sequence[float] | None,
    versions: Sequence[int],
    consumed_at: int,
    loss_mask: Sequence[int],
    masked: Sequence[int],
) -> dict[Colouring, str]:
    """Return a string of T characters for each colouring; LEGENDS says what they mean. All columns are [T].

    `consumed_at` is the policy version that trained on them; `masked` is 1 where the correction took a token out.
    """
    sampled = [bool(value) for value in loss_mask]
    learner = [math.nan] * len(logprobs) if learner_logprobs is None else learner_logprobs

    def where_sampled(levels: Sequence[str]) -> str:
        return "".join(level if is_sampled else UNSAMPLED for level, is_sampled in zip(levels, sampled, strict=True))

    return {
        "diff": where_sampled([_difference(ours - its) for ours, its in zip(learner, logprobs, strict=True)]),
        "version": where_sampled([str(min(max(consumed_at - version, 0), MOST_BEHIND)) for version in versions]),
        "mask": where_sampled([MASKED if gone else "0" for gone in masked]),
        "logprob": where_sampled([_rarity(value) for value in logprobs]),
    }


def _difference(value: float) -> str:
    if math.isnan(value):
        return UNKNOWN
    level = bisect_right(DIFFERENCES, abs(value))
    return "0" if level == 0 else (LESS if value < 0 else MORE)[level - 1]


def _rarity(logprob: float) -> str:
    return str(sum(logprob <= math.log(share) for share in PROBABILITIES))
