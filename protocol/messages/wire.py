"""Base class of every message, and the types of single values."""

from __future__ import annotations

from datetime import date
from enum import IntEnum, StrEnum
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field


class TokenSource(IntEnum):
    """Origin of a token."""

    POLICY = 0
    """The policy sampled it."""
    OBSERVATION = 1
    """An environment showed it, or a chat template set it around that: context, never trained."""
    INSERTED = 2
    """The ticket put it there: a hint, or a demonstration."""


class TrajectoryRole(StrEnum):
    """Purpose of a trajectory. The ticket decides it, the server records it."""

    TRAIN = "train"
    BASELINE = "baseline"
    """Greedy: scored and not trained."""
    DEMONSTRATION = "demonstration"
    """No token of it was sampled."""


PROTOCOL_MAJOR = 17
"""Raised by changes that an older peer cannot read; peers of another major are refused."""
PROTOCOL_MINOR = 0
"""Raised by additions that an older peer may ignore."""

T = TypeVar("T")
Many = Annotated[tuple[T, ...], FailFast()]
"""A list on the wire. Validation stops at its first mistake: a hostile header could cause millions of them."""
Version = Annotated[int, Field(ge=0, lt=2**31)]
TicketId = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
"""A measured time: sums and means of many stay finite."""
ContentHash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 of encoded image bytes, in hexadecimal."""

LONGEST_TEXT = 2000
"""Characters of a text for people; the rest is cut off."""


def printable(text: str, longest: int = LONGEST_TEXT) -> str:
    """`text` on one line, without control characters, shortened to `longest`."""
    if len(text) > longest:
        text = text[: longest - 3] + "..."
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


Text = Annotated[str, AfterValidator(printable)]
"""A sentence for people, kept short and on one line: it ends up in the other side's log."""
Day = Annotated[str, AfterValidator(lambda day: day and date.fromisoformat(day).isoformat())]
"""YYYY-MM-DD, or empty."""
PeerId = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x20\x7f]+$")]
"""A name in logs and metrics: no spaces, no control characters."""
Fingerprint = Annotated[str, Field(max_length=200)]


class Wire(BaseModel):
    """Base of every message and part: frozen, and unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
