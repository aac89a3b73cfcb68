"""Scores of an evaluation: pass@1 with its standard error, pass@k, and mean reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class EvaluationScores:
    """Means over the completions that could be scored; NaN if none could."""

    accuracy: float
    """pass@1: mean of the accuracy component."""
    accuracy_error: float
    best: float
    """pass@k of a 0/1 component: a row's largest accuracy among its k completions, mean over rows."""
    reward: float
    reward_error: float
    rows: int
    errors: int
    """Number of completions that could not be made or scored."""


def evaluation_scores(rows: Sequence[Sequence[tuple[float, float] | None]]) -> EvaluationScores:
    """`rows`: (accuracy component, reward) of each completion of each row; None for one without a score.

    Completions of one row are alike, so standard errors are those of the rows' means; NaN for less than two of them.
    """
    scored = [np.array(known) for row in rows if (known := [score for score in row if score is not None])]
    if not scored:
        nothing = float("nan")
        return EvaluationScores(nothing, nothing, nothing, nothing, nothing, len(rows), sum(map(len, rows)))
    accuracy, reward = np.concatenate(scored).mean(axis=0)
    means = np.array([row.mean(axis=0) for row in scored])
    errors = means.std(axis=0, ddof=1) / np.sqrt(len(means)) if len(means) > 1 else np.full(2, np.nan)
    return EvaluationScores(
        accuracy=float(accuracy),
        accuracy_error=float(errors[0]),
        best=float(np.mean([row[:, 0].max() for row in scored])),
        reward=float(reward),
        reward_error=float(errors[1]),
        rows=len(rows),
        errors=sum(map(len, rows)) - sum(map(len, scored)),
    )
