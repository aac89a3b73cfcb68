"""A sample as it is shown: one trajectory, with its row of a list and its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from protocol.messages import TokenSource, ToolCall

Order = Literal["newest", "oldest", "best", "worst", "stalest", "longest"]


@dataclass(frozen=True)
class SampleQuery:
    """The filters of a list. All given conditions must hold; ranges include both ends."""

    steps: tuple[int, int] | None = None
    rewards: tuple[float, float] | None = None
    statuses: tuple[str, ...] = ()
    staleness: tuple[int, int] | None = None
    """Versions between the oldest sampled token and the policy that consumed it."""
    prompt: str = ""
    """A part of the prompt's text, in upper or lower case."""
    ends: tuple[str, ...] = ()
    """Endings of conversations: `done`, `cut`, `failed`, or a limit."""
    tool: str = ""
    """A tool that it called."""
    call_errors: tuple[str, ...] | None = None
    """Kinds of error of a call of it, of `tool` where one is given; empty: any; None: calls may be right."""
    order: Order = "newest"


@dataclass(frozen=True)
class SampleRow:
    """One line of a list."""

    ticket_id: int
    trajectory: int
    """The number of the trajectory in its group."""
    step: int
    """The step that trained on it."""
    row_id: str
    """Empty where only the journal knows the sample: the index is missing."""
    prompt: str
    """The beginning of the last message's text."""
    answer: str
    status: str
    finish_reason: str
    reward: float | None
    advantage: float | None
    length: int
    """Completion tokens."""
    staleness: int
    logprob_diff_max: float | None
    """Largest absolute difference between learner and engine of a token that was sampled and trained; None: there is
    none."""
    error: str
    has_payload: bool
    """True if the journal keeps its tokens."""
    completion: str = ""
    """Completion; in a list its beginning, as long as its tokens are kept."""
    put_there: int = 0
    """Tokens at its beginning that the ticket's order put there: a hint, or a whole demonstration. 0, too, where its
    tokens are no longer kept."""
    greedy: bool = False
    """True if it is its group's greedy completion: scored, and not trained."""

    @property
    def origin(self) -> str:
        """Origin of a completion that the policy did not sample; empty for any other."""
        if self.put_there:
            return "demonstration" if self.put_there == self.length else f"hint of {self.put_there} tokens"
        return "greedy" if self.greedy else ""


@dataclass(frozen=True)
class Page:
    """A part of a list."""

    rows: tuple[SampleRow, ...]
    total: int
    """Samples that match the query."""


@dataclass(frozen=True)
class SampleImage:
    """An image of the prompt, or the first frame of a video."""

    hash: str
    data: bytes | None
    """Encoded bytes; None where `problem` says why they are missing."""
    problem: str = ""
    frames: int = 0
    """Number of frames of the video; 0 for an image."""


@dataclass(frozen=True)
class ShownMessage:
    """A message of an environment: a tool's result, or what a user says."""

    role: str
    parts: tuple[str | SampleImage, ...]
    """Texts and images in the order in which the policy read them."""


@dataclass(frozen=True)
class SampleTurn:
    """Tokens `[start, end)` of a completion that one turn sampled, and what was shown after it."""

    start: int
    end: int
    finish_reason: str
    reward: float | None
    """Reward by the environment; None where it was not asked."""
    shown: tuple[ShownMessage, ...]
    calls: tuple[ToolCall, ...] = ()
    info: str = ""
    """JSON of the environment's facts about it; empty: none."""
    context: int = 0
    """Tokens before it with which a new segment begins: its history as it was rewritten; 0: none begins."""


@dataclass(frozen=True)
class TrajectoryDetail:
    """A trajectory in full. Columns are [T], over the completion's tokens; all are empty if the group is not kept."""

    row: SampleRow
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Components before weighting."""
    tokens: tuple[str, ...] = ()
    """Texts which together are the completion. A character of several tokens is in the last of them."""
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """Log-probs of the engine that sampled the tokens."""
    learner_logprobs: np.ndarray | None = None
    """The learner's at the step, to three digits of the difference; NaN where nothing was trained; None: not known."""
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    source: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    """uint8 `TokenSource` of each token."""
    masked: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    """bool: the correction dropped the token."""
    turns: tuple[SampleTurn, ...] = ()
    """Turns that an environment answered; none where nobody did."""
    limit: str = ""
    """The limit of `environment.limits` that ended it; empty: none."""

    @property
    def is_sampled(self) -> np.ndarray:
        """[T] bool: tokens that the policy sampled."""
        return self.source == TokenSource.POLICY

    @property
    def consumed_at(self) -> int:
        """The policy version that trained on it."""
        sampled = self.versions[self.is_sampled]
        return int(sampled.min()) + self.row.staleness if sampled.size else 0


@dataclass(frozen=True)
class SampleDetail:
    """A group in full."""

    ticket_id: int
    server_id: str
    row_id: str
    messages: tuple[Mapping[str, str], ...]
    """Messages with `role` and `content`; `<image>` and `<video>` mark the places of media."""
    images: tuple[SampleImage, ...]
    answer: str
    trajectories: tuple[TrajectoryDetail, ...]
    problem: str
    """Reason that something is missing; empty if nothing is."""
    opening: tuple[ShownMessage, ...] = ()
    """First messages of the environment, at the end of the prompt."""
    quantization: str = ""
    """rollout.quantization of the policy that sampled it; empty: none."""
    is_damaged: bool = False
    """True if the journal should have its tokens but they cannot be read."""

    @property
    def step(self) -> int:
        return self.trajectories[0].row.step

    @property
    def all_images(self) -> tuple[SampleImage, ...]:
        """Images of the prompt, and those that the environment has shown."""
        shown = [*self.opening, *(m for one in self.trajectories for turn in one.turns for m in turn.shown)]
        return (*self.images, *(part for message in shown for part in message.parts if isinstance(part, SampleImage)))
