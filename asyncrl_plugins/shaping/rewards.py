"""Rewards of length and repetition, and of what the completions of one group are beside each other.

A function with a parameter `score` shapes another component: `shapes: NAME` in its entry of `reward.functions` hands it
that component's value, and its own value takes the place of it in the sum. A group function (`group: true`) gets the
samples of all completions of a prompt and returns as many numbers; `score` is then a list, with None where a completion
has no score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncrl.rewards.builtin import length_limit
from asyncrl.rewards.sample import RewardSample


def ngram_repetition(sample: RewardSample, *, n: int = 3) -> float:
    """Minus the share of repeated n-grams among the completion's words, 0 to -1 (arXiv 2502.03373, section 4).

    Words are what stands between spaces, in lower case; fewer than n of them are 0.
    Example: n 3, completion "a b c a b c a" has 5 trigrams, 3 of them different -> -0.4
    """
    words = sample.completion.lower().split()
    grams = [tuple(words[at : at + n]) for at in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


def cosine_length(
    sample: RewardSample,
    score: float,
    *,
    right: Sequence[float] = (1.0, 0.5),
    wrong: Sequence[float] = (-1.0, -0.5),
    right_from: float = 1.0,
) -> float:
    """A score by length, along half a cosine: a right completion gets more if short, a wrong one if long (2502.03373).

    `right` and `wrong` are the values at no tokens and at the limit of length; a `score` of `right_from` is right.
    Example: right, half of the limit -> 0.75; wrong, at the limit -> -0.5
    """
    at_none, at_limit = right if score >= right_from else wrong
    progress = min(sample.num_tokens / length_limit(sample), 1.0)
    return at_limit + 0.5 * (at_none - at_limit) * (1.0 + math.cos(math.pi * progress))


def stop_properly(sample: RewardSample, score: float, *, coefficient: float = 0.0) -> float:
    """The score; of a completion that was cut at the limit its `coefficient`-fold, or a negative one itself (ProRL).

    Example: score 1, cut: coefficient 0.5 -> 0.5, coefficient -1 -> -1; not cut -> 1
    """
    if sample.finish_reason == "stop":
        return score
    return score * coefficient if coefficient >= 0 else coefficient


# --- of a group ----------------------------------------------------------------------------------


def relative_length(
    samples: Sequence[RewardSample], score: Sequence[float | None], *, coefficient: float = 1.0, right_from: float = 1.0
) -> list[float]:
    """The score plus `coefficient` times 0.5 for the shortest completion of the group down to -0.5 for the longest.

    A wrong one never gains by it. Nothing is added where all are equally long (Kimi k1.5, 2501.12599, section 2.3.3).
    Example: scores 1, 1, 0 of 10, 20, 10 tokens -> 1.5, 0.5, 0
    """
    lengths = [sample.num_tokens for sample in samples]
    shortest, spread = min(lengths), max(lengths) - min(lengths)
    shaped: list[float] = []
    for length, given in zip(lengths, score, strict=True):
        added = 0.5 - (length - shortest) / spread if spread else 0.0
        known = 0.0 if given is None else given  # such a completion has failed already: its value is not used
        shaped.append(known + coefficient * (added if known >= right_from else min(0.0, added)))
    return shaped


def diversity(samples: Sequence[RewardSample], *, n: int = 2) -> list[float]:
    """How much each completion differs from the others of its group: 1 - the mean Jaccard index of n-grams of words.

    Completions with fewer than n words are compared as a whole; one alone is 0.
    Example: n 1, completions "a b", "a b", "c d" -> 0.5, 0.5, 1
    """
    grams = [_grams(sample.completion, n) for sample in samples]
    others = len(grams) - 1
    return [
        1.0 - sum(_jaccard(mine, theirs) for j, theirs in enumerate(grams) if j != i) / others if others else 0.0
        for i, mine in enumerate(grams)
    ]


def _grams(text: str, n: int) -> set[tuple[str, ...]]:
    words = text.lower().split()
    return {tuple(words[at : at + n]) for at in range(max(1, len(words) - n + 1))}


def _jaccard(a: set[tuple[str, ...]], b: set[tuple[str, ...]]) -> float:
    return len(a & b) / len(a | b)
