"""Results of tickets (rollout server -> learner), and their acknowledgement."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from protocol.frames import Blob, Float32Array, Int32Array, Int32Matrix, UInt8Array, UInt8Matrix
from protocol.messages.tickets import FinishReason, PartialRollout, TextPart
from protocol.messages.wire import ContentHash, Many, PeerId, Seconds, Text, TicketId, TokenSource, TrajectoryRole, Wire
from protocol.nesting import LONGEST_INFO, read_json

MOST_CALLS = 64
"""Calls of one turn that its record keeps."""
LONGEST_CALL = 1000
"""Characters of a call's arguments, or of its error, that a record keeps."""
CallErrorKind = Literal["", "malformed", "unknown_tool", "arguments", "tool", "not_run"]


Patches = Annotated[int, Field(gt=0, lt=2**31)]


class ObservedImage(Wire):
    """An image that an environment showed; its bytes are among the group's blobs."""

    type: Literal["image"] = "image"
    content_hash: ContentHash
    grid: tuple[Patches, Patches, Patches]
    """Temporal, height, width in patches, as the engine saw it."""


ObservedPart = Annotated[TextPart | ObservedImage, Field(discriminator="type")]


class ObservedMessage(Wire):
    """One message of an observation: a tool's result, or what a user says."""

    role: Literal["tool", "user"]
    content: Many[ObservedPart]


class EditedTurn(Wire):
    """A turn in a history that the environment has edited."""

    turn: int | None = Field(ge=0)
    """Number of the turn of which the sampled tokens stand there; None: `text` does."""
    text: str = ""
    shown: Many[ObservedMessage] = ()
    """The messages behind it; none: those that were shown after it, or behind the last one the turn's observation."""


class ToolCall(Wire):
    """A call of one turn, and what became of it."""

    name: str = Field(max_length=200)
    """Name of the tool as the policy wrote it; empty where its text did not get as far."""
    arguments: str = Field(default="", max_length=LONGEST_CALL)
    """JSON of the arguments by name, cut where it is longer."""
    error_kind: CallErrorKind = ""
    """Empty: it was answered. `malformed`: the text is no call; `arguments`: they do not fit the tool; `tool`: the tool
    said so; `not_run`: over the limit of calls in one turn."""
    error: str = Field(default="", max_length=LONGEST_CALL)
    """Error text that the policy saw."""
    seconds: Seconds = 0.0
    """Seconds in the tool; 0 where the environment does not measure its calls one by one."""


def _is_json_object(text: str) -> str:
    facts = read_json(text) if text else {}
    if not isinstance(facts, dict):
        raise ValueError("info is no JSON object")
    json.dumps(facts, allow_nan=False)  # a record of it is JSON for others, too
    return text


class Turn(Wire):
    """Tokens `[start, end)` of the completion that one assistant message sampled."""

    start: int = Field(ge=0)
    end: int = Field(ge=0)
    finish_reason: FinishReason | None = None
    """None: the trajectory's, whose only turn this is."""
    reward: float | None = None
    """Reward that the environment gave for this turn; None where it was not asked."""
    state_key: str = Field(default="", pattern=r"^[0-9a-f]{0,32}$")
    """The environment's state after this turn, at most 16 bytes in hexadecimal; empty: unsaid."""
    observation: Many[ObservedMessage] = ()
    """The messages that were shown after it, of which the tokens between it and the next turn are made; none after the
    last turn."""
    calls: Annotated[Many[ToolCall], Field(max_length=MOST_CALLS, exclude_if=lambda calls: not calls)] = ()
    """The first MOST_CALLS calls that its text holds; not on the wire where there is none."""
    context: Annotated[int, Field(ge=0, exclude_if=lambda count: not count)] = 0
    """Tokens before `start` with which a new segment begins, behind the prompt: all turns before, as the ticket's rule
    shows them now. 0, and not on the wire, where the turn goes on in the segment of the turn before."""
    history: Annotated[Many[EditedTurn], Field(exclude_if=lambda turns: not turns)] = ()
    """All turns so far, this one included, as the environment shows them to later ones; none, and not on the wire,
    where it has changed nothing."""
    info: Annotated[
        str, Field(max_length=LONGEST_INFO, exclude_if=lambda info: not info), AfterValidator(_is_json_object)
    ] = ""
    """A JSON object: the environment's facts about this turn, for the record. Nothing is trained on it."""


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


class TokenTraces(Wire):
    """Bytes of each token that the engine's model has computed beside its logits. A token that was no input, as the
    last one of a completion, has zeros."""

    prompt: UInt8Matrix
    """[P, width]"""
    completions: UInt8Matrix
    """[N, width]"""


TOKEN_COLUMNS = ("token_ids", "source", "logprobs", "versions")


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
    trajectories: Many[TrajectoryRecord]
    timings: GroupTimings
    traces: Annotated[dict[PeerId, TokenTraces], Field(exclude_if=lambda traces: not traces)] = Field(
        default_factory=dict
    )
    """Traces by the names of the methods that ask for them; not on the wire where none does."""

    @model_validator(mode="after")
    def _columns_agree(self) -> Group:
        total = int(self.lengths.sum())
        columns = {name: getattr(self, name) for name in TOKEN_COLUMNS}
        wrong = {name: column.size for name, column in columns.items() if column.size != total}
        if wrong or (self.lengths.size and self.lengths.min() < 0):
            raise ValueError(f"lengths add up to {total}, but {wrong}")
        if self.lengths.size != len(self.trajectories):
            raise ValueError(f"{self.lengths.size} lengths for {len(self.trajectories)} trajectories")
        if self.image_grids.shape[0] != len(self.image_hashes) or self.image_grids.shape[1] != 3:
            raise ValueError(f"image_grids {self.image_grids.shape} for {len(self.image_hashes)} images")
        grids = (0, 3) if self.video_grids is None else self.video_grids.shape
        if grids != (len(self.video_hashes), 3):
            raise ValueError(f"video_grids {grids} for {len(self.video_hashes)} videos")
        for name, traces in self.traces.items():
            shapes = traces.prompt.shape, traces.completions.shape
            if shapes != ((self.prompt_ids.size, shapes[0][1]), (total, shapes[0][1])):
                raise ValueError(f"traces {name} {shapes} of {self.prompt_ids.size} and {total} tokens")
        for length, record in zip(self.lengths.tolist(), self.trajectories, strict=True):
            for turn in record.turns:
                if turn.start > turn.end or turn.end > length or turn.context > turn.start:
                    raise ValueError(f"the turn of the tokens [{turn.start}, {turn.end}) lies outside its {length}")
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
