"""What is shown of a sample. A *sample* is one trajectory; its group is that of its ticket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Order = Literal["newest", "oldest", "best", "worst", "stalest", "longest"]


@dataclass(frozen=True)
class SampleQuery:
    """All conditions that are given must hold; ranges include both ends."""

    steps: tuple[int, int] | None = None
    rewards: tuple[float, float] | None = None
    statuses: tuple[str, ...] = ()
    staleness: tuple[int, int] | None = None
    """Of the oldest sampled token, in versions behind the one that consumed it."""
    prompt: str = ""
    """Part of the prompt's text, in upper or lower case."""
    order: Order = "newest"


@dataclass(frozen=True)
class SampleRow:
    """One line of a list."""

    ticket_id: int
    trajectory: int
    """Its number in the group."""
    step: int | None
    """That trained it; None: journaled, and not trained yet."""
    row_id: str
    """Empty where only the journal knows the sample (see `SampleStore.notices`)."""
    prompt: str
    """Beginning of the last message's text."""
    answer: str
    status: str
    finish_reason: str
    reward: float | None
    advantage: float | None
    length: int
    """Completion tokens."""
    staleness: int
    logprob_diff_max: float | None
    """Largest absolute difference between learner and engine of a trained token; None: nothing was trained."""
    error: str
    has_payload: bool
    """Whether its tokens are still kept."""


@dataclass(frozen=True)
class Page:
    rows: tuple[SampleRow, ...]
    total: int
    """Samples that fit the query."""


@dataclass(frozen=True)
class SampleImage:
    """An image of the prompt, or the first frame of a video."""

    hash: str
    data: bytes | None
    """Encoded bytes; None where `problem` says why not."""
    problem: str = ""
    frames: int = 0
    """Of the video that it begins; 0: it is an image."""


@dataclass(frozen=True)
class TrajectoryDetail:
    """Columns are [T], over the completion's tokens; all empty where the group is not kept any more."""

    trajectory: int
    status: str
    finish_reason: str
    reward: float | None
    advantage: float | None
    error: str
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Components before weighting."""
    tokens: tuple[str, ...] = ()
    """Their texts: together, the completion. A character of several tokens stands at the last of them."""
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """Of the engine that sampled it."""
    learner_logprobs: np.ndarray | None = None
    """Of the learner at the step, to three digits of the difference; NaN where nothing was trained; None: not known."""
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    loss_mask: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    """1 on tokens that the policy sampled."""
    masked: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    """bool: dropped by the correction."""


@dataclass(frozen=True)
class SampleDetail:
    """A whole group."""

    ticket_id: int
    step: int | None
    server_id: str
    row_id: str
    prompt: str
    """Text of the last message, in full."""
    messages: tuple[Mapping[str, str], ...]
    """`role` and `content`, with `<image>` and `<video>` where they stand."""
    images: tuple[SampleImage, ...]
    answer: str
    rows: tuple[SampleRow, ...]
    trajectories: tuple[TrajectoryDetail, ...]
    problem: str
    """Why something is missing; empty if nothing is."""
    is_damaged: bool = False
    """Its tokens should be there."""
