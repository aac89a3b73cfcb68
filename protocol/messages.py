"""Every message of protocol version 3, as typed models. README.md has them as a table; a test compares.

Words: a *ticket* is the learner's permission to produce one *group*: the `group_size` trajectories of
one prompt. A *policy version* counts weight publications; 0 is the initial policy.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, model_validator

from protocol.errors import ErrorCode
from protocol.frames import Blob, Float32Array, Int32Array, Int32Matrix, UInt8Array

PROTOCOL_MAJOR = 3
"""Raised by changes that an older peer cannot read; peers of another major are refused."""
PROTOCOL_MINOR = 0
"""Raised by additions that an older peer may ignore."""

T = TypeVar("T")
Many = Annotated[tuple[T, ...], FailFast()]
"""A list on the wire. Checking stops at its first mistake: a hostile header could make millions of them."""
Version = Annotated[int, Field(ge=0, lt=2**31)]
TicketId = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(allow_inf_nan=False)]
Fence = Annotated[int, Field(gt=0, lt=2**63)]
"""Number of one tenure of the device lease, larger than all before it."""
ContentHash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 of encoded image bytes, in hexadecimal."""


LONGEST_TEXT = 2000


def printable(text: str, longest: int = LONGEST_TEXT) -> str:
    """`text` on one line, without control characters, shortened to `longest`."""
    if len(text) > longest:
        text = text[: longest - 3] + "..."
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


Text = Annotated[str, AfterValidator(printable)]
"""A sentence for people. It ends up in the other side's log, so a peer can fill or forge none."""
PeerId = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x20\x7f]+$")]
"""A name in logs and metrics: no spaces, no control characters."""
Fingerprint = Annotated[str, Field(max_length=200)]


class Wire(BaseModel):
    """Base of everything on the wire: frozen, and unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


# --- prompts and tickets (learner -> rollout server) ------------------------------------------


class TextPart(Wire):
    type: Literal["text"] = "text"
    text: str


class ImagePart(Wire):
    """Stands where an image belongs; the images of a prompt are used in order."""

    type: Literal["image"] = "image"


class VideoPart(Wire):
    """Stands where a video belongs; the videos of a prompt are used in order."""

    type: Literal["video"] = "video"


ContentPart = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]


class Video(Wire):
    """Frames that were chosen before; no side picks among them."""

    frame_hashes: Annotated[Many[ContentHash], Field(min_length=1)]
    """Content hash of each frame, an encoded image, in order."""
    fps: float = Field(gt=0, allow_inf_nan=False)
    """Frames per second, as they are here: it places them in time for models that want to know."""


class ChatMessage(Wire):
    role: Literal["system", "user", "assistant", "tool"]
    content: Many[ContentPart]


class Prompt(Wire):
    """One dataset row, rendered to messages."""

    row_id: str
    """Names the row in messages to the user: `<file or dataset>:<index>`."""
    messages: Many[ChatMessage]
    image_hashes: Many[ContentHash] = ()
    """Content hash of each image in order of appearance; the bytes travel once per message."""
    videos: Many[Video] = ()
    """In order of appearance; their frames travel as images do."""
    answer: Any = None
    columns: dict[str, Any] = {}
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
        """Of everything that travels with it: images, then the frames of videos."""
        return (*self.image_hashes, *(digest for video in self.videos for digest in video.frame_hashes))


class Sampling(Wire):
    """The behaviour policy: softmax(logits / temperature), cut by min_p, then top_k, then top_p, and renormalised.

    The log-probs of a group are of exactly this distribution.
    """

    temperature: float = Field(default=1.0, ge=0)
    """0 means greedy decoding (evaluation only: log-probs are those of temperature 1)."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """The most probable tokens until their mass reaches this; 1 keeps all."""
    top_k: int = Field(default=0, ge=0)
    """So many most probable tokens; 0 keeps all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Tokens of at least this fraction of the most probable one's probability; 0 keeps all."""
    max_new_tokens: int = Field(gt=0)
    stop_token_ids: Many[int]
    banned_token_ids: Many[int] = ()
    """Ids that can never be sampled: image and video placeholders and their fences."""

    @property
    def truncates(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class TicketKind(StrEnum):
    TRAIN = "train"
    EVAL = "eval"
    PARITY = "parity"
    """To see whether engine and learner agree on log-probs: sampled like training, without rewards."""


class Ticket(Wire):
    ticket_id: TicketId
    kind: TicketKind
    prompt: Prompt
    group_size: int = Field(gt=0)
    seed: int = Field(ge=0)
    """Together with the trajectory's index in the group, decides every random draw of it."""
    min_version: Version
    """The server may start the ticket only with weights of this version or newer."""
    sampling: Sampling


class Tickets(Wire):
    """Permission to start these groups. All tickets of one message are admitted to the engine together."""

    type: Literal["tickets"] = "tickets"
    tickets: Many[Ticket]
    blobs: dict[ContentHash, Blob] = {}
    """Encoded bytes (PNG, JPEG, ...) of images and frames by content hash, each once."""


# --- groups (rollout server -> learner) --------------------------------------------------------


class TrajectoryStatus(StrEnum):
    """How one trajectory ended. Only `finished` and `truncated` rows carry a score."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    TIMED_OUT = "timed_out"
    ERROR = "error"

    @property
    def is_scored(self) -> bool:
        return self is TrajectoryStatus.FINISHED or self is TrajectoryStatus.TRUNCATED


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Turn(Wire):
    """Tokens `[start, end)` of the completion that one assistant message sampled."""

    start: int = Field(ge=0)
    end: int = Field(ge=0)


class TrajectoryRecord(Wire):
    """What is said once per trajectory; its tokens are in the group's columns."""

    status: TrajectoryStatus
    finish_reason: FinishReason
    error_kind: Text = ""
    """For `error` and `timed_out`: a short stable name like `reward_timeout`, `reward_exception`."""
    error_message: Text = ""
    rewards: dict[str, float] = {}
    """Each reward component before weighting."""
    reward: float | None = None
    """The weighted sum; None unless the status is scored."""
    turns: Many[Turn]


class GroupTimings(Wire):
    """Seconds, measured on the server."""

    queued_s: Seconds
    generate_s: Seconds
    reward_s: Seconds


class Group(Wire):
    """The trajectories of one ticket. Columns are flat over trajectories: `N = sum(lengths)`."""

    type: Literal["group"] = "group"
    ticket_id: TicketId
    server_id: PeerId
    prompt_ids: Int32Array
    """[P] exact prompt token ids, image placeholders expanded."""
    image_grids: Int32Matrix
    """[images, 3] temporal, height, width in patches, in order of appearance."""
    image_hashes: Many[ContentHash]
    video_grids: Int32Matrix | None = None
    """[videos, 3] as of images; None without videos."""
    video_hashes: Many[ContentHash] = ()
    """SHA-256 of the hexadecimal content hashes of each video's frames, in order."""
    lengths: Int32Array
    """[group_size] completion tokens of each trajectory."""
    token_ids: Int32Array
    """[N] completion token ids."""
    loss_mask: UInt8Array
    """[N] 1 on tokens that the policy sampled, 0 on what the environment put in."""
    logprobs: Float32Array
    """[N] behaviour log-probabilities of the sampled tokens."""
    versions: Int32Array
    """[N] policy version that sampled each token, stamped when it was decoded."""
    kv_versions: Int32Array | None = None
    """[N] oldest policy version in the key-value cache that the token was sampled from; None: equal to `versions`."""
    trajectories: Many[TrajectoryRecord]
    timings: GroupTimings

    @model_validator(mode="after")
    def _columns_agree(self) -> Group:
        total = int(self.lengths.sum())
        sizes = {
            "token_ids": self.token_ids.size,
            "loss_mask": self.loss_mask.size,
            "logprobs": self.logprobs.size,
            "versions": self.versions.size,
        }
        if self.kv_versions is not None:
            sizes["kv_versions"] = self.kv_versions.size
        wrong = {name: size for name, size in sizes.items() if size != total}
        if wrong or (self.lengths.size and self.lengths.min() < 0):
            raise ValueError(f"lengths add up to {total}, but {wrong}")
        if self.lengths.size != len(self.trajectories):
            raise ValueError(f"{self.lengths.size} lengths for {len(self.trajectories)} trajectories")
        if self.image_grids.shape[0] != len(self.image_hashes) or self.image_grids.shape[1] != 3:
            raise ValueError(f"image_grids {self.image_grids.shape} for {len(self.image_hashes)} images")
        grids = (0, 3) if self.video_grids is None else self.video_grids.shape
        if grids != (len(self.video_hashes), 3):
            raise ValueError(f"video_grids {grids} for {len(self.video_hashes)} videos")
        for length, record in zip(self.lengths.tolist(), self.trajectories, strict=True):
            for turn in record.turns:
                if turn.start > turn.end or turn.end > length:
                    raise ValueError(f"a turn lies outside its {length} tokens: {record.turns}")
        return self


class Ack(Wire):
    """These groups are safe with the learner; the server may forget them."""

    type: Literal["ack"] = "ack"
    ticket_ids: Many[TicketId]


class TicketFailed(Wire):
    """The server could not produce the group at all; the ticket returns to the learner."""

    type: Literal["ticket_failed"] = "ticket_failed"
    ticket_id: TicketId
    error_kind: Text
    error_message: Text


# --- life cycle ---------------------------------------------------------------------------------


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


class DeviceSource(Wire):
    """Weights that can be had from device memory to device memory."""

    uuid: Fingerprint
    """Of the CUDA device that they lie on."""
    total_bytes: int = Field(ge=0)
    """Of a version, which the receiver needs room for beside its model."""


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
    """The sender stops. `expected` tells an orderly end from a failure."""

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


# --- the device lease (trainer.mode=sync; see lease.py) ----------------------------------------------


class LeaseGrant(Wire):
    """The learner sleeps: take the lease under this fence, and wake up."""

    type: Literal["lease_grant"] = "lease_grant"
    fence: Fence


class LeaseRecall(Wire):
    """The learner needs the device: sleep, and return what you hold under this fence or an older one."""

    type: Literal["lease_recall"] = "lease_recall"
    fence: Fence


class LeaseReturn(Wire):
    """The server sleeps, and the lease is free."""

    type: Literal["lease_return"] = "lease_return"
    fence: Fence
    wake_s: Seconds
    """To wake up, or to load the model the first time."""
    sleep_s: Seconds
    """To fall asleep."""
    sleep_bytes: int = Field(ge=0)
    """That left the device."""


# --- weights ------------------------------------------------------------------------------------


class TensorEntry(Wire):
    name: str
    dtype: str
    """Torch name without the prefix: `float32`, `bfloat16`, ..."""
    shape: Many[int]
    offset: int = Field(ge=0)
    """Bytes from the start of the publication."""
    nbytes: int = Field(ge=0)
    xxh3: int = Field(ge=0, lt=1 << 64)
    """XXH3, 64 bits, seed 0, of the tensor's bytes."""


class AdapterSpec(Wire):
    """What low-rank adapters (LoRA) look like: enough to build them on the base model."""

    rank: int = Field(gt=0)
    alpha: int = Field(gt=0)
    """Their output is scaled by alpha / rank."""
    target_modules: Many[str]
    """Full names of the linear layers with an adapter."""


class WeightManifest(Wire):
    """Announces one policy version. Sent on the control socket; the data is fetched elsewhere."""

    type: Literal["weights"] = "weights"
    version: Version
    tensors: Many[TensorEntry]
    total_bytes: int
    shm_path: str = ""
    """Memory-mapped file with exactly this layout, for peers with the same `host_id`; empty: none."""
    adapter: AdapterSpec | None = None
    """The tensors are an adapter for the base model that both sides hold, under PEFT's names; None: a whole model."""


Channel = Literal["shm", "zmq", "nccl", "cuda_ipc"]
"""How a version gets from the learner into an engine."""


class WeightsLoaded(Wire):
    """The server samples from this version from now on."""

    type: Literal["weights_loaded"] = "weights_loaded"
    version: Version
    channel: Channel
    transfer_s: Seconds
    load_s: Seconds


class ChunkRequest(Wire):
    """On the weights endpoint: give me these bytes of this version."""

    type: Literal["chunk_request"] = "chunk_request"
    version: Version
    offset: int = Field(ge=0)
    nbytes: int = Field(gt=0)


class Chunk(Wire):
    type: Literal["chunk"] = "chunk"
    version: Version
    offset: int
    data: Blob


class TransferRequest(Wire):
    """On the weights endpoint: send this version from your device memory into that of my engine."""

    type: Literal["transfer_request"] = "transfer_request"
    version: Version
    nonce: PeerId
    """Names this transfer."""
    channel: Literal["nccl", "cuda_ipc"]
    receivers: int = Field(gt=0, le=64)
    """Processes of the engine, each of which takes all of it."""


class CudaMemory(Wire):
    """Memory of the learner's that another process on the same GPU can open: CUDA's and torch's handles."""

    handle: bytes = Field(max_length=4096)
    nbytes: int = Field(gt=0)
    offset: int = Field(ge=0)
    counter: bytes = Field(max_length=4096)
    """Name of torch's count of receivers, in memory that both map."""
    counter_offset: int = Field(ge=0)
    event: bytes = Field(max_length=4096)
    """The memory is complete when this event has happened."""
    event_sync: bool


class TransferStart(Wire):
    """Both sides begin now. Each transfer has its own group; a later one starts from the beginning."""

    type: Literal["transfer_start"] = "transfer_start"
    version: Version
    nonce: PeerId
    port: int = Field(default=0, ge=0, le=65535)
    """`nccl`: where the group meets, on the host that the server dialled."""
    memory: CudaMemory | None = None
    """`cuda_ipc`: what to copy from; until `transfer_end` it stays as it is."""


class TransferEnd(Wire):
    """The engine has all of it, or has given up: the learner may forget the transfer."""

    type: Literal["transfer_end"] = "transfer_end"
    nonce: PeerId


ControlFromServer = Hello | Group | TicketFailed | ServerHeartbeat | WeightsLoaded | LeaseReturn | Goodbye | Error
ControlFromLearner = (
    Welcome | Refusal | Tickets | Ack | WeightManifest | LearnerHeartbeat | LeaseGrant | LeaseRecall | Goodbye | Error
)
WeightsFromServer = ChunkRequest | TransferRequest | TransferEnd
WeightsFromLearner = Chunk | TransferStart | Error
Message = ControlFromServer | ControlFromLearner | WeightsFromServer | WeightsFromLearner
