"""Score of a completion, and the messages that bring it to a process that scores and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from asyncrl.errors import UserError
from asyncrl.rewards.sample import OF_THE_COMPLETION, RewardSample
from protocol.values import as_json


@dataclass(frozen=True)
class Score:
    """Result of scoring one completion. Scorers add components to it; `RewardScorer` adds the reward."""

    components: dict[str, float] = field(default_factory=dict)
    """Each component before weighting; empty where one has failed."""
    reward: float | None = None
    """Weighted sum of all components; None before the last one, and where one has failed."""
    error_kind: str = ""
    """reward_exception, reward_timeout, reward_memory, reward_nan, reward_type, reward_crash, or a plug-in's own; empty
    where nothing has failed."""
    error_message: str = ""
    """Names the component and, where there is one, the file and line."""
    seconds: float = 0.0
    """Time on this completion in the workers, waiting for a free one not included."""

    @property
    def status(self) -> Literal["ok", "timed_out", "error"]:
        if not self.error_kind:
            return "ok"
        return "timed_out" if self.error_kind == "reward_timeout" else "error"

    def plus(self, component: str, value: float) -> Score:
        """The score with one more component, unless it has failed."""
        return self if self.error_kind else replace(self, components={**self.components, component: value})

    def failed(self, kind: str, message: str) -> Score:
        """The failed score. The first failure stays."""
        return self if self.error_kind else Score(error_kind=kind, error_message=message, seconds=self.seconds)

    def later(self, seconds: float) -> Score:
        return replace(self, seconds=self.seconds + seconds)


def request_of(samples: Sequence[RewardSample], scores: Sequence[Score], names: Sequence[str]) -> dict[str, Any]:
    """The message that asks for components. It holds once what the samples share."""
    return {
        "row": {name: value for name, value in vars(samples[0]).items() if name not in OF_THE_COMPLETION},
        "completions": [{name: getattr(sample, name) for name in OF_THE_COMPLETION} for sample in samples],
        "scores": list(map(vars, scores)),
        "components": list(names),
    }


def samples_of(request: Mapping[str, Any]) -> list[RewardSample]:
    return [RewardSample(**request["row"], **completion) for completion in request["completions"]]


def scores_of(message: Mapping[str, Any]) -> list[Score]:
    """The scores in such a message, or in the answer to it, whose seconds are added to each."""
    return [Score(**score).later(message.get("seconds", 0.0)) for score in message["scores"]]


MOST_VALUES = 50
"""Most values of a column by which scores are told apart."""


@dataclass(frozen=True)
class EvaluationScores:
    """Means over the completions that could be scored; NaN if none could."""

    accuracy: float
    """Mean of the accuracy component: pass@1, unless it is graded."""
    accuracy_error: float
    best: float
    """A row's largest accuracy among its k completions, mean over rows: pass@k, unless it is graded."""
    is_graded: bool
    """True where some completion has an accuracy that is neither 0 nor 1."""
    reward: float
    reward_error: float
    rows: int
    errors: int
    """Number of completions that could not be made or scored."""


def accuracy_and_reward(components: Mapping[str, float], reward: float | None, name: str) -> tuple[float, float] | None:
    """Component `name` of a completion, or its reward where the name is empty, and the reward; None without a score."""
    return None if reward is None else (components[name] if name else reward, reward)


def evaluation_scores(rows: Sequence[Sequence[tuple[float, float] | None]]) -> EvaluationScores:
    """`rows`: (accuracy component, reward) of each completion of each row; None for one without a score.

    Completions of one row are alike, so standard errors are those of the rows' means; NaN for less than two of them.
    """
    import numpy as np  # not in a reward worker

    scored = [np.array(known) for row in rows if (known := [score for score in row if score is not None])]
    if not scored:
        nothing = float("nan")
        return EvaluationScores(nothing, nothing, nothing, False, nothing, nothing, len(rows), sum(map(len, rows)))
    accuracy, reward = np.concatenate(scored).mean(axis=0)
    means = np.array([row.mean(axis=0) for row in scored])
    errors = means.std(axis=0, ddof=1) / np.sqrt(len(means)) if len(means) > 1 else np.full(2, np.nan)
    return EvaluationScores(
        accuracy=float(accuracy),
        accuracy_error=float(errors[0]),
        best=float(np.mean([row[:, 0].max() for row in scored])),
        is_graded=bool(((each := np.concatenate(scored)[:, 0]) * (1 - each)).any()),
        reward=float(reward),
        reward_error=float(errors[1]),
        rows=len(rows),
        errors=sum(map(len, rows)) - sum(map(len, scored)),
    )


def labels_by(column: str, values: Sequence[Any], setting: str) -> list[str]:
    """`kind=colour` for each row's value in a column named by `setting`. Raises UserError for more than MOST_VALUES."""
    labels = [f"{column}={as_json(value)}" for value in values]
    if (number := len(set(labels))) > MOST_VALUES:
        raise UserError(f"{setting} is {column!r}, which has {number} values, over {MOST_VALUES}. Name one of groups")
    return labels


def label_values(labels: Sequence[str], rows: Sequence[Sequence[tuple[float, float] | None]]) -> dict[str, float]:
    """Numbers of a record of evaluations.jsonl, such as `accuracy/kind=colour`; none without labels, nor where nothing
    tells one."""
    found = scores_by_label(labels, rows).items() if labels else ()
    names = ("accuracy", "accuracy_error", "rows")
    return {
        f"{name}/{label}": value
        for label, scores in found
        for name in names
        if math.isfinite(value := getattr(scores, name))
    }


def scores_by_label(
    labels: Sequence[str], rows: Sequence[Sequence[tuple[float, float] | None]]
) -> dict[str, EvaluationScores]:
    """`evaluation_scores` of the rows with each label: a policy that went to the most frequent answer shows there."""
    parts: dict[str, list[Sequence[tuple[float, float] | None]]] = {label: [] for label in sorted(set(labels))}
    for label, row in zip(labels, rows, strict=True):
        parts[label].append(row)
    return {label: evaluation_scores(part) for label, part in parts.items()}


def accuracies_by_label(evaluation: Mapping[str, Any]) -> str:
    """Accuracies of the labels in a record of evaluations.jsonl, the lowest first; empty where it has none."""
    prefix = "accuracy/"
    found = {key.removeprefix(prefix): value for key, value in evaluation.items() if key.startswith(prefix)}
    known = sorted((value, label) for label, value in found.items() if isinstance(value, int | float))
    return ", ".join(f"{label} {value:.3f}" for value, label in known)
