"""Every message of protocol version 3, as typed models. README.md has them as a table; a test compares.

Words: a *ticket* is the learner's permission to produce one *group*: the `group_size` trajectories of
one prompt. A *policy version* counts weight publications; 0 is the initial policy.

Reading order: `wire.py`, the base of all; `tickets.py` go out and `groups.py` come back; `life_cycle.py`, `lease.py`,
`weights.py`, `device_transfer.py`. Below: who may send what.
"""

from __future__ import annotations

from protocol.messages.device_transfer import (
    CudaMemory,
    DeviceSource,
    TransferEnd,
    TransferRequest,
    TransferStart,
)
from protocol.messages.groups import (
    Ack,
    FinishReason,
    Group,
    GroupTimings,
    TicketFailed,
    TrajectoryRecord,
    TrajectoryStatus,
    Turn,
)
from protocol.messages.lease import LeaseGrant, LeaseRecall, LeaseReturn
from protocol.messages.life_cycle import Error, Goodbye, Hello, LearnerHeartbeat, Refusal, ServerHeartbeat, Welcome
from protocol.messages.tickets import (
    ChatMessage,
    ContentPart,
    ImagePart,
    Prompt,
    Sampling,
    TextPart,
    Ticket,
    TicketKind,
    Tickets,
    Video,
    VideoPart,
)
from protocol.messages.weights import (
    AdapterSpec,
    Channel,
    Chunk,
    ChunkRequest,
    TensorEntry,
    WeightManifest,
    WeightsLoaded,
)
from protocol.messages.wire import LONGEST_TEXT, PROTOCOL_MAJOR, PROTOCOL_MINOR, Wire, printable

ControlFromServer = Hello | Group | TicketFailed | ServerHeartbeat | WeightsLoaded | LeaseReturn | Goodbye | Error
ControlFromLearner = (
    Welcome | Refusal | Tickets | Ack | WeightManifest | LearnerHeartbeat | LeaseGrant | LeaseRecall | Goodbye | Error
)
WeightsFromServer = ChunkRequest | TransferRequest | TransferEnd
WeightsFromLearner = Chunk | TransferStart | Error
Message = ControlFromServer | ControlFromLearner | WeightsFromServer | WeightsFromLearner

__all__ = [
    "LONGEST_TEXT",
    "PROTOCOL_MAJOR",
    "PROTOCOL_MINOR",
    "Ack",
    "AdapterSpec",
    "Channel",
    "ChatMessage",
    "Chunk",
    "ChunkRequest",
    "ContentPart",
    "ControlFromLearner",
    "ControlFromServer",
    "CudaMemory",
    "DeviceSource",
    "Error",
    "FinishReason",
    "Goodbye",
    "Group",
    "GroupTimings",
    "Hello",
    "ImagePart",
    "LearnerHeartbeat",
    "LeaseGrant",
    "LeaseRecall",
    "LeaseReturn",
    "Message",
    "Prompt",
    "Refusal",
    "Sampling",
    "ServerHeartbeat",
    "TensorEntry",
    "TextPart",
    "Ticket",
    "TicketFailed",
    "TicketKind",
    "Tickets",
    "TrajectoryRecord",
    "TrajectoryStatus",
    "TransferEnd",
    "TransferRequest",
    "TransferStart",
    "Turn",
    "Video",
    "VideoPart",
    "WeightManifest",
    "WeightsFromLearner",
    "WeightsFromServer",
    "WeightsLoaded",
    "Welcome",
    "Wire",
    "printable",
]
