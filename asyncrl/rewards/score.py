"""Results of scoring: a Score of each completion, or the Failure that prevents one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from asyncrl.rewards.sample import OF_THE_COMPLETION, RewardSample


@dataclass(frozen=True)
class Score:
    """The outcome of one sample. `components` and `reward` are filled only where the status is `ok`."""

    status: Literal["ok", "timed_out", "error"]
    error_kind: str = ""
    """reward_exception, reward_timeout, reward_memory, reward_nan, reward_type, reward_crash, or a plug-in's own."""
    error_message: str = ""
    """Names the component and, where there is one, the file and line."""
    components: dict[str, float] = field(default_factory=dict)
    """Each component before weighting."""
    reward: float | None = None
    """The weighted sum."""
    seconds: float = 0.0
    """Time on this sample in the workers, waiting for a free one not included."""


@dataclass(frozen=True)
class Failure:
    kind: str
    """Kind, as Score.error_kind."""
    message: str

    @property
    def status(self) -> Literal["timed_out", "error"]:
        return "timed_out" if self.kind == "reward_timeout" else "error"


Row = dict[str, float] | Failure
"""The components of one completion so far by name, or what it failed of."""


@dataclass(frozen=True)
class StageReply:
    rows: list[Row]
    """Rewards of each completion; the entry of one that had failed before is ignored."""
    seconds: float


class Scorer(Protocol):
    """A place where components are computed: the worker processes, or a plug-in's own."""

    counts: Counter[str]
    """Totals for the metrics: `requests/OUTCOME` and `tokens/KIND`, of a reward that asks another service."""

    async def start(self) -> None:
        """Raises UserError."""
        ...

    async def score(self, samples: Sequence[RewardSample], rows: Sequence[Row], names: Sequence[str]) -> StageReply:
        """The components `names` of completions of one prompt. Raises BadStateError, RuntimeError after `close()`."""
        ...

    async def close(self) -> None: ...


def request_of(samples: Sequence[RewardSample], rows: Sequence[Row], names: Sequence[str]) -> dict[str, Any]:
    """The message that asks for components: what the samples share travels once."""
    shared = {name: value for name, value in vars(samples[0]).items() if name not in OF_THE_COMPLETION}
    return {
        "row": shared,
        "completions": [{name: getattr(sample, name) for name in OF_THE_COMPLETION} for sample in samples],
        "scores": [None if isinstance(row, Failure) else row for row in rows],
        "components": list(names),
    }


def samples_of(request: Mapping[str, Any]) -> list[RewardSample]:
    """The samples of such a message."""
    return [RewardSample(**request["row"], **completion) for completion in request["completions"]]


def rows_of(reply: Mapping[str, Any]) -> list[Row]:
    """Rewards of each completion, from the answer to such a message."""
    return [
        Failure(row["error_kind"], f"reward component {row['failed']!r}: {row['error_message']}")
        if "error_kind" in row
        else row["components"]
        for row in reply["rows"]
    ]
