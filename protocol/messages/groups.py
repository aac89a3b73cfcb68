"""Results of tickets (rollout server -> learner), and their acknowledgement."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from protocol.frames import Blob, Float32Array, Int32Array, Int32Matrix, UInt8Array
from protocol.messages.sources import TokenSource, TrajectoryRole
from protocol.messages.tickets import FinishReason, PartialRollout
from protocol.messages.turns import ObservedMessage, Turn
from protocol.messages.wire import ContentHash, Many, PeerId, Seconds, Text, TicketId, Wire


class TrajectoryStatus(StrEnum):
    """How one trajectory ended. Only `finished` and `truncated` rows carry a score."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    TIMED_OUT = "timed_out"
    ERROR = "error"

    @property
    def is_scored(self) -> bool:
        return self is TrajectoryStatus.FINISHED or self is TrajectoryStatus.TRUNCATED


Limit = Literal["", "turns", "tokens", "images", "seconds"]


class TrajectoryRecord(Wire):
    """Outcome of one trajectory; its tokens are in the group's columns."""

    status: TrajectoryStatus
    finish_reason: FinishReason
    """Finish reason of the last turn."""
    role: TrajectoryRole = TrajectoryRole.TRAIN
    """Purpose that its ticket gives it."""
    limit: Limit = ""
    """The limit of the ticket's conversation that ended it before the environment did; empty: none."""
    error_kind: Text = ""
    """Short stable name for `error` and `timed_out`, like `reward_timeout`, `reward_exception`."""
    error_message: Text = ""
    rewards: dict[str, float] = Field(default_factory=dict)
    """Reward components before weighting, by name."""
    reward: float | None = None
    """Weighted sum of the components, and the sum of the turns' rewards; None unless the status is scored."""
    turns: Many[Turn]
    image_hashes: Many[ContentHash] = ()
    """Content hash of each image that the engine saw in place of the prompt's, as its order has it."""

    @property
    def segment_starts(self) -> tuple[int, ...]:
        """Tokens of the completion with which its segments begin: 0, and wherever its history was rewritten."""
        return (0, *(turn.start - turn.context for turn in self.turns if turn.context))

    @property
    def environment_error(self) -> str:
        """The kind of failure by which the environment lost it; empty: none."""
        return self.error_kind if self.error_kind.startswith("environment_") else ""

    @property
    def is_answered(self) -> bool:
        """Whether an environment, or its limits, had a part in it."""
        answered = any(turn.reward is not None or turn.observation for turn in self.turns)
        return answered or bool(self.limit or self.environment_error)

    @property
    def end(self) -> str:
        """End of a conversation: `done` (policy or environment), `cut` (its last turn), a limit, or `failed`."""
        if self.environment_error:
            return "failed"
        return self.limit or ("cut" if self.finish_reason is FinishReason.LENGTH else "done")


class GroupTimings(Wire):
    """Seconds, measured on the server."""

    generate_s: Seconds
    reward_s: Seconds
    environment_s: Seconds = 0.0
    """Waits for the environment, of all trajectories together."""


TOKEN_COLUMNS = ("token_ids", "source", "logprobs", "versions", "kv_versions")


class Group(Wire):
    """The trajectories of one ticket. Columns are flat over trajectories: `N = sum(lengths)`."""

    type: Literal["group"] = "group"
    ticket_id: TicketId
    server_id: PeerId
    prompt_ids: Int32Array
    """[P] exact prompt token ids, image placeholders expanded, what the environment opened with included."""
    opening: Many[ObservedMessage] = ()
    """First messages of the environment, to all trajectories: the end of the prompt's last message if that is a user's,
    or a user's message behind it."""
    blobs: dict[ContentHash, Blob] = Field(default_factory=dict)
    """Encoded bytes of the images of the opening and of observations, by content hash, each once."""
    image_grids: Int32Matrix
    """[images, 3] in order of appearance: temporal, height, width in patches; of other families than Qwen-VL the three
    numbers that the image's tokens follow from (asyncrl/processing/image_grids.py)."""
    image_hashes: Many[ContentHash]
    video_grids: Int32Matrix | None = None
    """[videos, 3] as of images; None without videos."""
    video_hashes: Many[ContentHash] = ()
    """SHA-256 of the hexadecimal content hashes of each video's frames, in order."""
    lengths: Int32Array
    """[group_size] completion tokens of each trajectory."""
    token_ids: Int32Array
    """[N] completion token ids."""
    source: UInt8Array
    """[N] `TokenSource` of each token."""
    logprobs: Float32Array
    """[N] behaviour log-probabilities of the sampled tokens, 0 elsewhere."""
    versions: Int32Array
    """[N] policy version that sampled each token, stamped when it was decoded. An inserted token has the version that
    was current then, an observed one that of the token before it."""
    kv_versions: Int32Array | None = None
    """[N] oldest policy version in the key-value cache that the token was sampled from; None: equal to `versions`."""
    trajectories: Many[TrajectoryRecord]
    timings: GroupTimings

    @model_validator(mode="after")
    def _columns_agree(self) -> Group:
        total = int(self.lengths.sum())
        columns = {name: getattr(self, name) for name in TOKEN_COLUMNS}
        wrong = {name: c.size for name, c in columns.items() if c is not None and c.size != total}
        if wrong or (self.lengths.size and self.lengths.min() < 0):
            raise ValueError(f"lengths add up to {total}, but {wrong}")
        if self.lengths.size != len(self.trajectories):
            raise ValueError(f"{self.lengths.size} lengths for {len(self.trajectories)} trajectories")
        if self.image_grids.shape[0] != len(self.image_hashes) or self.image_grids.shape[1] != 3:
            raise ValueError(f"image_grids {self.image_grids.shape} for {len(self.image_hashes)} images")
        grids = (0, 3) if self.video_grids is None else self.video_grids.shape
        if grids != (len(self.video_hashes), 3):
            raise ValueError(f"video_grids {grids} for {len(self.video_hashes)} videos")
        for length, record in zip(self.lengths.tolist(), self.trajectories, strict=True):
            for turn in record.turns:
                if turn.start > turn.end or turn.end > length or turn.context > turn.start:
                    raise ValueError(f"a turn lies outside its {length} tokens: {record.turns}")
        return self

    @property
    def is_sampled(self) -> np.ndarray:
        """[N] bool: tokens that the policy sampled."""
        return self.source == TokenSource.POLICY

    def span(self, index: int) -> slice:
        """Slice of a trajectory's tokens in the columns."""
        end = int(self.lengths[: index + 1].sum())
        return slice(end - int(self.lengths[index]), end)


class Ack(Wire):
    """Acknowledgement: these groups are safe with the learner; the server may forget them."""

    type: Literal["ack"] = "ack"
    ticket_ids: Many[TicketId]


class TicketFailed(Wire):
    """The server could not produce the group at all; the ticket returns to the learner."""

    type: Literal["ticket_failed"] = "ticket_failed"
    ticket_id: TicketId
    error_kind: Text
    error_message: Text


class TicketReturned(Wire):
    """The server gives a ticket back with what it has sampled of it: it leaves, or was asked to. No failure."""

    type: Literal["ticket_returned"] = "ticket_returned"
    ticket_id: TicketId
    partial: PartialRollout
