"""Every message of the protocol as a typed model. README.md lists them in a table; a test compares the two.

Words: a *ticket* is the learner's permission to produce one *group*: the `group_size` trajectories of
one prompt. A *policy version* counts weight publications; 0 is the initial policy.

Reading order: `wire.py` has the base class; `tickets.py` go out and `groups.py` come back, which `turns.py` are part
of; then `life_cycle.py` and `weights.py`. The unions below say which messages each endpoint receives.
"""

# ruff: noqa: F401  (these names are the interface of the package)

from __future__ import annotations

from protocol.messages.groups import (
    Ack,
    EditedTurn,
    Group,
    GroupTimings,
    Limit,
    ObservedImage,
    ObservedMessage,
    TicketFailed,
    TicketReturned,
    TokenTraces,
    ToolCall,
    TrajectoryRecord,
    TrajectoryStatus,
    Turn,
)
from protocol.messages.life_cycle import (
    Error,
    Goodbye,
    Hello,
    LearnerHeartbeat,
    LeaseGrant,
    LeaseRecall,
    LeaseReturn,
    Refusal,
    ServerHeartbeat,
    Welcome,
)
from protocol.messages.tickets import (
    NO_REQUEST,
    ChatMessage,
    ContentPart,
    ConversationLimits,
    FinishReason,
    ImagePart,
    PartialRollout,
    Prompt,
    Sampling,
    TextPart,
    Ticket,
    TicketKind,
    Tickets,
    TrajectoryRequest,
    Video,
    VideoPart,
)
from protocol.messages.weights import (
    AdapterSpec,
    Channel,
    Chunk,
    ChunkRequest,
    CudaMemory,
    DeviceSource,
    Source,
    SourceFailure,
    SourceRequest,
    TensorEntry,
    TransferEnd,
    TransferRequest,
    TransferStart,
    WeightManifest,
    WeightsLoaded,
)
from protocol.messages.wire import (
    LONGEST_TEXT,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    TokenSource,
    TrajectoryRole,
    Wire,
    printable,
)

ControlFromServer = (
    Hello | Group | TicketFailed | TicketReturned | ServerHeartbeat | WeightsLoaded | LeaseReturn | Goodbye | Error
)
ControlFromLearner = (
    Welcome | Refusal | Tickets | Ack | WeightManifest | LearnerHeartbeat | LeaseGrant | LeaseRecall | Goodbye | Error
)
WeightsFromServer = SourceRequest | ChunkRequest | TransferRequest | TransferEnd
WeightsFromLearner = Source | Chunk | TransferStart | Error
Message = ControlFromServer | ControlFromLearner | WeightsFromServer | WeightsFromLearner
