"""Connection life cycle, both ways: hello, welcome, heartbeats, the device lease, goodbye and errors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from protocol.errors import ErrorCode
from protocol.messages.weights import DeviceSource
from protocol.messages.wire import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Count,
    Day,
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
    """Changes at every start of the process: tells a restart from a reconnection."""
    host_id: Fingerprint
    """Equal on two processes that can share memory."""
    engine: Fingerprint
    model_fingerprint: Fingerprint
    """Fingerprint of the architecture: parameter names, shapes and dtypes."""
    processor_fingerprint: Fingerprint
    """Fingerprint of processor, tokenizer and chat template."""
    base_fingerprint: Fingerprint = ""
    """Fingerprint of the base weights' content; empty when whole models travel, not adapters."""
    scoring: Many[tuple[Text, Fingerprint]] = ()
    """Fingerprints of whatever scores completions, by name: the settings of all rewards first, then their files."""
    quantization: Fingerprint = ""
    """Grid that its engine rounds every version to: the policy that samples is then that one."""
    max_groups: int = Field(gt=0)
    """Training groups that the server is willing to hold at once, running or queued, and rows of an evaluation."""
    pid: int
    mode: Literal["async", "sync"] = "async"
    """`sync`: the server touches the device only while it holds the lease that the learner grants."""
    held_ticket_ids: Many[TicketId] = ()
    """Tickets in work, and those with unacknowledged groups: no other server need work on them."""


class Welcome(Wire):
    """The learner accepts the server, and says how to reach its weights and how often to beat."""

    type: Literal["welcome"] = "welcome"
    protocol_major: int = PROTOCOL_MAJOR
    protocol_minor: int = PROTOCOL_MINOR
    run_id: str
    incarnation: str
    """Changes at every start of the learner: weights of an earlier one must be loaded again."""
    host_id: str
    version: Version
    """The learner's policy version; its manifest follows as `weights`."""
    weights_port: int
    """Port of the weights endpoint, on the host that the server dialled."""
    heartbeat_s: float = Field(gt=0)
    """Send a heartbeat this often; silence of `timeout_s` means the peer is gone."""
    timeout_s: float = Field(gt=0)
    device: DeviceSource | None = None
    """None: there is no device channel from this learner, only `shm` and `zmq`."""
    template_date: Day = ""
    """Day that chat templates of this run take for today; empty: this one's asks for none."""


class Refusal(Wire):
    """The learner will not work with this server; it must not retry unchanged."""

    type: Literal["refusal"] = "refusal"
    code: ErrorCode
    reason: Text
    fix: Text


class ServerHeartbeat(Wire):
    """The server is alive; its work so far."""

    type: Literal["server_heartbeat"] = "server_heartbeat"
    version: Version
    groups_queued: Count
    groups_running: Count
    groups_unacknowledged: Count
    tokens_generated: Count
    """Sampled tokens since the process started."""
    busy_s: Seconds
    """Seconds since the process started in which the engine had work."""
    uptime_s: Seconds


class LearnerHeartbeat(Wire):
    """The learner is alive."""

    type: Literal["learner_heartbeat"] = "learner_heartbeat"
    version: Version


class Goodbye(Wire):
    """The sender stops. `expected` from a server: this is no failure; from a learner: the run is finished."""

    type: Literal["goodbye"] = "goodbye"
    reason: Text
    expected: bool = True


class Error(Wire):
    """Answer to a message that could not be used. Never fatal for the receiver."""

    type: Literal["error"] = "error"
    code: ErrorCode
    reason: Text
    ticket_id: TicketId | None = None
    version: Version | None = None
    """Version that a chunk request asked for: tells a late answer from one to a newer request."""


Fence = Annotated[int, Field(gt=0, lt=2**63)]
"""Number of one tenure of the device lease, larger than all before it."""


class LeaseGrant(Wire):
    """The learner sleeps: take the lease under this fence, and wake up (see protocol/device_lock.py)."""

    type: Literal["lease_grant"] = "lease_grant"
    fence: Fence


class LeaseRecall(Wire):
    """The learner needs the device: sleep, and return the lease held under this fence or an older one."""

    type: Literal["lease_recall"] = "lease_recall"
    fence: Fence


class LeaseReturn(Wire):
    """The server sleeps, and the lease is free."""

    type: Literal["lease_return"] = "lease_return"
    fence: Fence
    wake_s: Seconds
    """Seconds to wake up, or to load the model the first time."""
    sleep_s: Seconds
    """Seconds to fall asleep."""
    sleep_bytes: Count
    """Bytes that left the device."""
