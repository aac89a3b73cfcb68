"""Stable codes of errors in messages and peers."""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Code of an `error` or `refusal` message; README.md says what its receiver does."""

    MALFORMED = "malformed"
    """Not MessagePack, or not a message of this protocol."""
    TOO_LARGE = "too_large"
    """A frame, the message, or the number of frames exceeds the limits."""
    UNKNOWN_TYPE = "unknown_type"
    WRONG_DIRECTION = "wrong_direction"
    """A known message that this endpoint does not receive."""
    NOT_WELCOME = "not_welcome"
    """The peer has not been welcomed yet; it must say hello first."""
    PROTOCOL_VERSION = "protocol_version"
    MODEL_MISMATCH = "model_mismatch"
    PROCESSOR_MISMATCH = "processor_mismatch"
    REWARD_MISMATCH = "reward_mismatch"
    """The server would score completions by other rewards than the run has."""
    MODE_MISMATCH = "mode_mismatch"
    """One side shares its device by the lease (trainer.mode=sync), the other does not."""
    DUPLICATE_SERVER = "duplicate_server"
    PARITY = "parity"
    """The engine computes other log-probs than the learner for the same tokens and weights."""
    UNKNOWN_TICKET = "unknown_ticket"
    REFUSED_GROUP = "refused_group"
    """The group does not fit its ticket: counts, grids, hashes, versions or banned ids."""
    VERSION_GONE = "version_gone"
    """The requested weights have been replaced by newer ones."""
    NOT_YET = "not_yet"
    """The bytes asked for are of a version that the sender is still receiving; they follow."""
    WRONG_CHANNEL = "wrong_channel"
    """The learner does not send weights over the channel that was asked for."""
    STALE_FENCE = "stale_fence"
    """The device lease has passed on since the fence that the message names, or was never lent."""
    MUTED = "muted"
    """The peer sent too many useless messages, or too many at all: it is ignored for a while."""


class ProtocolError(Exception):
    """A message that cannot be used. `code` goes on the wire, the text says what and where."""

    def __init__(self, code: ErrorCode, reason: str):
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason
