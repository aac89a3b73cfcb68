"""Turns of a conversation: what the model sampled, and what it was shown after that."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from protocol.messages.tickets import FinishReason, TextPart
from protocol.messages.wire import ContentHash, Many, Seconds, Wire

MOST_CALLS = 64
"""Calls of one turn that its record keeps."""
LONGEST_CALL = 1000
"""Characters of a call's arguments, or of its error, that a record keeps."""
LONGEST_INFO = 4096
"""Characters of an environment's facts about one turn."""
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
    if text and not isinstance(json.loads(text), dict):
        raise ValueError("info is no JSON object")
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
