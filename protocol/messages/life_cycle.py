"""Who is there, who is welcome, who lives: both ways."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from protocol.errors import ErrorCode
from protocol.messages.device_transfer import DeviceSource
from protocol.messages.wire import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Fingerprint,
    Many,
    PeerId,
    Seconds,
    Text,
    TicketId,
    Version,
    Wire,
)


class Hello(Wire):
    """First message of a server, and again after every reconnection."""

    type: Literal["hello"] = "hello"
    protocol_major: int = PROTOCOL_MAJOR
    protocol_minor: int = PROTOCOL_MINOR
    server_id: PeerId
    session: PeerId
    """New at every start of the process: tells a restart from a reconnection."""
    host_id: Fingerprint
    """Equal on two processes that can share memory."""
    engine: Fingerprint
    model_fingerprint: Fingerprint
    """Of the architecture: parameter names, shapes and dtypes."""
    processor_fingerprint: Fingerprint
    """Of processor, tokenizer and chat template."""
    base_fingerprint: Fingerprint = ""
    """Of the content of the weights that adapters are added to; empty where whole models travel."""
    max_groups: int = Field(gt=0)
    """Groups that the server is willing to hold at once, running or queued."""
    pid: int
    mode: Literal["async", "sync"] = "async"
    """`sync`: touches the device only while it holds the lease that the learner grants."""
    held_ticket_ids: Many[TicketId] = ()
    """Tickets in work, and those whose groups are not acknowledged: nobody else need work on them."""


class Welcome(Wire):
    type: Literal["welcome"] = "welcome"
    protocol_major: int = PROTOCOL_MAJOR
    protocol_minor: int = PROTOCOL_MINOR
    run_id: str
    incarnation: str
    """New at every start of the learner: weights of an earlier one must be loaded again."""
    host_id: str
    version: Version
    """The learner's policy version; its manifest follows as `weights`."""
    weights_port: int
    """On the host that the server dialled."""
    heartbeat_s: float = Field(gt=0)
    """Send a heartbeat this often; silence of `timeout_s` means the peer is gone."""
    timeout_s: float = Field(gt=0)
    device: DeviceSource | None = None
    """None: there is no device channel from this learner, only `shm` and `zmq`."""


class Refusal(Wire):
    """The learner will not work with this server; it must not retry unchanged."""

    type: Literal["refusal"] = "refusal"
    code: ErrorCode
    reason: Text
    fix: Text


class ServerHeartbeat(Wire):
    type: Literal["server_heartbeat"] = "server_heartbeat"
    version: Version
    groups_queued: int
    groups_running: int
    groups_unacknowledged: int
    tokens_generated: int
    """Sampled tokens since the process started."""
    busy_s: Seconds
    """Seconds since the process started in which the engine had work."""
    uptime_s: Seconds


class LearnerHeartbeat(Wire):
    type: Literal["learner_heartbeat"] = "learner_heartbeat"
    version: Version
    step: int


class Goodbye(Wire):
    """The sender stops. `expected`: of a server, it is no failure; of a learner, the run is finished."""

    type: Literal["goodbye"] = "goodbye"
    reason: Text
    expected: bool = True
    unfinished_ticket_ids: Many[TicketId] = ()


class Error(Wire):
    """Answer to a message that could not be used. Never fatal for the receiver."""

    type: Literal["error"] = "error"
    code: ErrorCode
    reason: Text
    ticket_id: TicketId | None = None
    version: Version | None = None
    """The weights that a chunk request asked for: tells a late answer from one to a newer request."""
