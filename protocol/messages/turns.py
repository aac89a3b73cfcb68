"""Turns of a conversation: what the model sampled, and what it was shown after that."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from protocol.messages.tickets import TextPart
from protocol.messages.wire import ContentHash, Many, Wire


class FinishReason(StrEnum):
    """Why sampling stopped."""

    STOP = "stop"
    LENGTH = "length"


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


class Turn(Wire):
    """Tokens `[start, end)` of the completion that one assistant message sampled."""

    start: int = Field(ge=0)
    end: int = Field(ge=0)
    finish_reason: FinishReason | None = None
    """None: the trajectory's, whose only turn this is."""
    reward: float | None = None
    """What the environment gave for this turn; None where it was not asked."""
    state_key: str = Field(default="", pattern=r"^[0-9a-f]{0,32}$")
    """The environment's state after this turn, at most 16 bytes in hexadecimal; empty: unsaid."""
    observation: Many[ObservedMessage] = ()
    """The messages that were shown after it, of which the tokens between it and the next turn are made; none after the
    last turn."""
