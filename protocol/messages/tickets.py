"""Prompts and tickets: learner -> rollout server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field, PlainSerializer, SerializationInfo, ValidationInfo, model_validator

from protocol.frames import Blob, Float32Array, FrameSink, FrameSource, Int32Array
from protocol.messages.wire import ContentHash, Many, TicketId, TrajectoryRole, Version, Wire
from protocol.values import pack_values, unpack_values


class TextPart(Wire):
    """Text within a chat message."""

    type: Literal["text"] = "text"
    text: str


class ImagePart(Wire):
    """Placeholder of an image; the images of a prompt are used in order."""

    type: Literal["image"] = "image"


class VideoPart(Wire):
    """Placeholder of a video; the videos of a prompt are used in order."""

    type: Literal["video"] = "video"


ContentPart = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]


class Video(Wire):
    """Frames of a video, chosen by the learner; no side drops any of them."""

    frame_hashes: Annotated[Many[ContentHash], Field(min_length=1)]
    """Content hash of each frame, an encoded image, in order."""
    fps: float = Field(gt=0, allow_inf_nan=False)
    """Frames per second of these frames, for models that place them in time."""


class ChatMessage(Wire):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Many[ContentPart]
    others: dict[str, Any] = Field(default_factory=dict)
    """Further keys for the model's chat template, such as `tool_calls` (whose arguments are maps), `name`,
    `tool_call_id` and `reasoning_content`."""


def _packed(value: Any, info: SerializationInfo) -> Any:
    return pack_values(value) if isinstance(info.context, FrameSink) else value


def _unpacked(value: Any, info: ValidationInfo) -> Any:
    return unpack_values(value) if isinstance(info.context, FrameSource) else value


_ON_WIRE = BeforeValidator(_unpacked), PlainSerializer(_packed)
"""A value of the data set is bytes on the wire, packed with types that the header has not (`protocol.values`)."""


class Prompt(Wire):
    """One dataset row, rendered to messages."""

    row_id: str
    """Names the row in messages to the user: `<file or dataset>:<index>`."""
    messages: Many[ChatMessage]
    image_hashes: Many[ContentHash] = ()
    """Content hash of each image in order of appearance; the bytes travel once per message."""
    videos: Many[Video] = ()
    """Videos in order of appearance; their frames travel as images do."""
    answer: Annotated[Any, *_ON_WIRE] = None
    columns: Annotated[dict[str, Any], *_ON_WIRE] = Field(default_factory=dict)
    """The row's other columns, for the reward."""

    @model_validator(mode="after")
    def _one_placeholder_each(self) -> Prompt:
        for kind, count in (("image", len(self.image_hashes)), ("video", len(self.videos))):
            parts = sum(part.type == kind for message in self.messages for part in message.content)
            if parts != count:
                raise ValueError(f"row {self.row_id}: {parts} {kind} placeholders in the messages, {count} {kind}s")
        return self

    @property
    def media_hashes(self) -> tuple[str, ...]:
        """Content hashes of all media of the prompt: images, then the frames of videos."""
        return (*self.image_hashes, *(digest for video in self.videos for digest in video.frame_hashes))


class FinishReason(StrEnum):
    """Reason why sampling stopped."""

    STOP = "stop"
    LENGTH = "length"


class Sampling(Wire):
    """The behaviour policy: softmax(logits / temperature), cut by min_p, then top_k, then top_p, and renormalised.

    The log-probs of a group are of exactly this distribution.
    """

    temperature: float = Field(default=1.0, ge=0)
    """0 means greedy decoding (evaluation only: log-probs are those of temperature 1)."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """The most probable tokens until their mass reaches this; 1 keeps all."""
    top_k: int = Field(default=0, ge=0)
    """Number of most probable tokens to keep; 0 keeps all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Tokens of at least this fraction of the most probable one's probability; 0 keeps all."""
    max_new_tokens: int = Field(gt=0)
    stop_token_ids: Many[int]
    banned_token_ids: Many[int] = ()
    """Ids that can never be sampled: image and video placeholders and their fences."""

    def finish_reason(self, token_ids: Sequence[int]) -> FinishReason | None:
        """Finish reason of a completion of these tokens, its prefix included; None: it goes on."""
        if token_ids and token_ids[-1] in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(token_ids) >= self.max_new_tokens else None

    @property
    def truncates(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class TicketKind(StrEnum):
    """Purpose of a ticket."""

    TRAIN = "train"
    EVAL = "eval"
    PARITY = "parity"
    """Compares log-probs of engine and learner: sampled like training, without rewards."""


class TrajectoryRequest(Wire):
    """Request for one trajectory of a group, besides that it is sampled."""

    greedy: bool = False
    """The most probable token each time, as at temperature 0: a trajectory that is scored and not trained."""
    prefix: Many[Annotated[int, Field(ge=0, lt=2**31)]] = ()
    """[K] token ids that the completion begins with, put there and not sampled: their log-prob is 0, and their
    version is the one that was current then. They count in `max_new_tokens`. A stop token at their end makes them the
    whole completion: a demonstration."""
    images: Many[ContentHash] = ()
    """Content hashes of images that the engine sees in place of the prompt's, one for each and as large; none: the
    prompt's own. Their bytes travel with the ticket. The reward sees the prompt's."""


NO_REQUEST = TrajectoryRequest()
HistoryRule = Literal["whole", "strip_thinking"]


class ConversationLimits(Wire):
    """Limits of a trajectory of several turns, and how much of its history later turns see. `Sampling.max_new_tokens`
    counts its tokens: the observed included, and those that a rewritten history shows again."""

    turns: int = Field(gt=0)
    tokens_per_turn: int = Field(gt=0)
    """Sampled tokens of one turn. A turn that is cut here ends its trajectory."""
    images: int = Field(ge=0)
    """Images that observations may show, the opening's not counted; one that is shown again counts once."""
    history: Annotated[HistoryRule, Field(exclude_if=lambda rule: rule == "whole")] = "whole"
    """`strip_thinking`: later turns see earlier ones without what was thought. Not on the wire where it is `whole`."""
    keep_images: Annotated[int, Field(ge=0, exclude_if=lambda count: not count)] = 0
    """Images of observations that a turn sees: the newest, and at least all of the observation before it. 0 leaves none
    out, and is not on the wire."""


class PartialRollout(Wire):
    """Sampled part of a group, finished or not. Columns are flat over trajectories: `N = sum(lengths)`.

    Whoever has the ticket next goes on from there: tokens, log-probs and versions stay what they are.
    """

    lengths: Int32Array
    """[group_size] tokens of each trajectory, those that its order puts there included."""
    token_ids: Int32Array
    """[N] completion token ids."""
    logprobs: Float32Array
    """[N] behaviour log-probabilities, 0 on what an order puts there."""
    versions: Int32Array
    """[N] policy version that sampled each token."""

    @model_validator(mode="after")
    def _columns_agree(self) -> PartialRollout:
        total = int(self.lengths.sum())
        sizes = [column.size for column in (self.token_ids, self.logprobs, self.versions)]
        if any(size != total for size in sizes) or (self.lengths.size and self.lengths.min() < 0):
            raise ValueError(f"lengths add up to {total}, but the columns have {sizes} entries")
        return self

    def span(self, index: int) -> slice:
        """Slice of a trajectory's tokens in the columns."""
        end = int(self.lengths[: index + 1].sum())
        return slice(end - int(self.lengths[index]), end)

    def joined(self, other: PartialRollout) -> PartialRollout:
        """Take each trajectory from the other where it goes on from this one's, and else keep this one's: of two
        samples the first stays, whatever their lengths. Raises ValueError where their numbers differ."""
        if self.lengths.size != other.lengths.size:
            raise ValueError(f"{other.lengths.size} partial trajectories beside {self.lengths.size}")
        sources: list[PartialRollout] = []
        for index, length in enumerate(self.lengths.tolist()):
            mine, theirs = self.token_ids[self.span(index)], other.token_ids[other.span(index)]
            goes_on = len(theirs) > length and np.array_equal(theirs[:length], mine)
            sources.append(other if goes_on else self)
        spans = [(source, source.span(index)) for index, source in enumerate(sources)]

        def column(of: Callable[[PartialRollout], np.ndarray]) -> np.ndarray:
            return np.concatenate([of(source)[span] for source, span in spans])

        return PartialRollout(
            lengths=np.asarray([span.stop - span.start for _, span in spans], np.int32),
            token_ids=column(lambda partial: partial.token_ids),
            logprobs=column(lambda partial: partial.logprobs),
            versions=column(lambda partial: partial.versions),
        )

    @property
    def nbytes(self) -> int:
        return 4 * (self.lengths.size + 3 * self.token_ids.size)


class Ticket(Wire):
    """The learner's permission to produce one group."""

    ticket_id: TicketId
    kind: TicketKind
    prompt: Prompt
    group_size: int = Field(gt=0)
    seed: int = Field(ge=0)
    """Seed that, with the trajectory's index in the group, decides every random draw."""
    min_version: Version
    """The server may start the ticket only with weights of this version or newer."""
    sampling: Sampling
    requests: Many[TrajectoryRequest] = ()
    """One for each trajectory; none: all are simply sampled."""
    conversation: ConversationLimits | None = None
    """An environment answers each turn, within these limits; None: trajectories have one turn, and nobody answers."""
    partial: PartialRollout | None = None
    """Part that other servers have sampled, to go on from; None: the group begins anew."""

    @model_validator(mode="after")
    def _requests_fit(self) -> Ticket:
        where, sampling = f"ticket {self.ticket_id} (row {self.prompt.row_id})", self.sampling
        if self.requests and len(self.requests) != self.group_size:
            raise ValueError(f"{where}: {len(self.requests)} requests for {self.group_size} trajectories")
        for index, wanted in enumerate(self.requests):
            if len(wanted.images) not in (0, len(self.prompt.image_hashes)):
                raise ValueError(
                    f"{where}: trajectory {index} has {len(wanted.images)} images in place of "
                    f"{len(self.prompt.image_hashes)}"
                )
            if len(wanted.prefix) > sampling.max_new_tokens:
                raise ValueError(
                    f"{where}: trajectory {index} begins with {len(wanted.prefix)} tokens, over max_new_tokens "
                    f"{sampling.max_new_tokens}"
                )
            if banned := sorted({*wanted.prefix} & {*sampling.banned_token_ids}):
                raise ValueError(f"{where}: trajectory {index} begins with banned token ids {banned}")
            if stops := sorted({*wanted.prefix[:-1]} & {*sampling.stop_token_ids}):
                raise ValueError(f"{where}: trajectory {index} goes on behind the stop token ids {stops}")
            if self.conversation and (wanted.prefix or wanted.images):
                raise ValueError(f"{where}: trajectory {index} of a conversation has a prefix, or images of its own")
        return self

    @model_validator(mode="after")
    def _partial_fits(self) -> Ticket:
        if self.partial is None:
            return self
        where, partial, sampling = f"ticket {self.ticket_id} (row {self.prompt.row_id})", self.partial, self.sampling
        if self.conversation:
            raise ValueError(f"{where}: a conversation cannot go on elsewhere: its environment stays where it is")
        if partial.lengths.size != self.group_size:
            raise ValueError(f"{where}: {partial.lengths.size} partial trajectories for a group of {self.group_size}")
        if partial.lengths.max() > sampling.max_new_tokens:
            longest = int(partial.lengths.max())
            raise ValueError(f"{where}: a partial trajectory of {longest} tokens, over {sampling.max_new_tokens}")
        if partial.versions.size and partial.versions.min() < self.min_version:
            oldest = int(partial.versions.min())
            raise ValueError(f"{where}: a partial token of version {oldest}, before min_version {self.min_version}")
        if np.isin(partial.token_ids, sampling.banned_token_ids).any():
            raise ValueError(f"{where}: a partial trajectory has banned token ids")
        for index in range(self.group_size):
            prefix = self.request(index).prefix
            token_ids = partial.token_ids[partial.span(index)].tolist()
            if token_ids and token_ids[: len(prefix)] != [*prefix]:
                raise ValueError(f"{where}: partial trajectory {index} does not begin as its request has it")
            if stops := {*token_ids[:-1]} & {*sampling.stop_token_ids}:
                raise ValueError(f"{where}: partial trajectory {index} goes on behind the stop token ids {stops}")
        return self

    def going_on(self, partial: PartialRollout) -> Ticket:
        """The ticket for a server that goes on from there. Raises ValueError where it does not fit."""
        return Ticket.model_validate({**dict(self), "partial": partial})

    @property
    def begins_at(self) -> int:
        """Oldest version whose weights may sample the next token: versions never fall within a trajectory."""
        sampled = self.partial.versions if self.partial else ()
        return max(self.min_version, int(np.max(sampled, initial=0)))

    def role(self, index: int) -> TrajectoryRole:
        """Purpose of trajectory `index` of the group."""
        wanted = self.request(index)
        if wanted.greedy:
            return TrajectoryRole.BASELINE
        is_whole = wanted.prefix and self.sampling.finish_reason(wanted.prefix)
        return TrajectoryRole.DEMONSTRATION if is_whole else TrajectoryRole.TRAIN

    def request(self, index: int) -> TrajectoryRequest:
        """The request for trajectory `index` of the group."""
        return self.requests[index] if self.requests else NO_REQUEST


class Tickets(Wire):
    """Permission to start these groups. All tickets of one message are admitted to the engine together."""

    type: Literal["tickets"] = "tickets"
    tickets: Many[Ticket]
    blobs: dict[ContentHash, Blob] = Field(default_factory=dict)
    """Encoded bytes (PNG, JPEG, ...) of images and frames by content hash, each once."""
