"""Worker processes on another machine: a rollout server (or `asyncrl eval`) asks a pool for them, and talks to them.

The pool only carries bytes. What they mean is between the two ends of the process's pipes (asyncrl/rewards/channel.py).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from protocol.frames import Blob
from protocol.messages.wire import PROTOCOL_MAJOR, PROTOCOL_MINOR, PeerId, Text, Wire

WorkerKind = Literal["reward", "environment"]
"""Kind of worker, the only ones that a pool starts."""
ProcessNumber = Annotated[int, Field(gt=0, lt=2**63)]
"""The asking side's number of a process. It is never used again within a session."""


class PoolHello(Wire):
    """First message to a pool, and again after every reconnection."""

    type: Literal["pool_hello"] = "pool_hello"
    protocol_major: int = PROTOCOL_MAJOR
    protocol_minor: int = PROTOCOL_MINOR
    server_id: PeerId
    """Server's id, which a reconnection keeps: processes of the connection before are ended."""
    session: PeerId
    """Session of the processes that are asked for from now on."""
    heartbeat_s: float = Field(gt=0, lt=3600)
    """The pool says it is alive this often, and so does the asking side."""
    timeout_s: float = Field(gt=0, lt=86400)
    """Silence after which the pool ends the processes."""


class PoolWelcome(Wire):
    """The pool will start processes."""

    type: Literal["pool_welcome"] = "pool_welcome"
    session: PeerId
    host: Text
    """Name of the pool's machine, for messages."""


class ProcessStart(Wire):
    """Start a worker process. It is sent its first message as any other."""

    type: Literal["process_start"] = "process_start"
    process: ProcessNumber
    kind: WorkerKind


class ProcessStarted(Wire):
    """The process runs, on a place of its own."""

    type: Literal["process_started"] = "process_started"
    process: ProcessNumber
    pid: int


class ProcessData(Wire):
    """To the process: one whole message. From it: the next bytes of what it answers."""

    type: Literal["process_data"] = "process_data"
    process: ProcessNumber
    data: Blob


class ProcessStop(Wire):
    """Kill the process with everything below it."""

    type: Literal["process_stop"] = "process_stop"
    process: ProcessNumber


class ProcessEnded(Wire):
    """The process and all that it started are gone, or it was never started."""

    type: Literal["process_ended"] = "process_ended"
    process: ProcessNumber
    reason: Text


class PoolHeartbeat(Wire):
    """The sender is alive."""

    type: Literal["pool_heartbeat"] = "pool_heartbeat"
