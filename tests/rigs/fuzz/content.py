"""The run that is fuzzed: every ticket has one right group, known to all, so that a wrong one cannot hide."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

import numpy as np

from protocol.codec import encode
from protocol.errors import ErrorCode
from protocol.messages import (
    Ack,
    ChatMessage,
    Chunk,
    ChunkRequest,
    CudaMemory,
    Error,
    FinishReason,
    Goodbye,
    Group,
    GroupTimings,
    Hello,
    ImagePart,
    LearnerHeartbeat,
    LeaseGrant,
    LeaseRecall,
    LeaseReturn,
    ObservedImage,
    ObservedMessage,
    PartialRollout,
    Prompt,
    Refusal,
    Sampling,
    ServerHeartbeat,
    Source,
    SourceFailure,
    SourceRequest,
    TensorEntry,
    TextPart,
    Ticket,
    TicketFailed,
    TicketKind,
    TicketReturned,
    Tickets,
    ToolCall,
    TrajectoryRecord,
    TrajectoryRequest,
    TrajectoryStatus,
    TransferEnd,
    TransferRequest,
    TransferStart,
    Turn,
    WeightManifest,
    WeightsLoaded,
    Welcome,
    Wire,
)

GROUP_SIZE = 2
VOCABULARY = 1000
BANNED = 900
STOP = 0
MAX_NEW_TOKENS = 16
IMAGE_GRIDS = np.asarray([[1, 4, 4]], np.int32)
"""[images, 3]."""
MODEL, PROCESSOR = "model-fingerprint", "processor-fingerprint"


@lru_cache(maxsize=512)
def image(ticket_id: int) -> tuple[str, bytes]:
    """Content hash and bytes."""
    data = np.random.default_rng(ticket_id).bytes(20_000)
    return hashlib.sha256(data).hexdigest(), data


def prompt_ids(ticket_id: int) -> np.ndarray:
    """[P] int32, different for every ticket."""
    return np.asarray([*divmod(ticket_id % 2**30, VOCABULARY), 1, 2, 3, 4, 5, 6], np.int32)


def ticket(ticket_id: int, version: int) -> Ticket:
    content = (ImagePart(), TextPart(text=f"question {ticket_id}"))
    prompt = Prompt(
        row_id=f"fuzz:{ticket_id}",
        messages=(ChatMessage(role="user", content=content),),
        image_hashes=(image(ticket_id)[0],),
        answer=str(ticket_id),
        columns={"difficulty": 3, "tags": ["a", "b"]},
    )
    return Ticket(
        ticket_id=ticket_id,
        kind=TicketKind.TRAIN,
        prompt=prompt,
        group_size=GROUP_SIZE,
        seed=ticket_id,
        min_version=version,
        sampling=Sampling(max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=(STOP,), banned_token_ids=(BANNED,)),
    )


def group(ticket_id: int, version: int, server_id: str, lengths: Sequence[int] | None = None) -> Group:
    """The only right answer to a ticket; or, with `lengths`, a group of other trajectories."""
    random = np.random.default_rng(ticket_id)
    drawn = random.integers(1, MAX_NEW_TOKENS + 1, GROUP_SIZE)
    sizes = np.asarray(drawn if lengths is None else lengths, np.int32)
    total = int(sizes.sum())
    token_ids = random.integers(0, BANNED, total).astype(np.int32)
    token_ids[np.cumsum(sizes[sizes > 0]) - 1] = STOP
    records = tuple(
        TrajectoryRecord(
            status=TrajectoryStatus.FINISHED,
            finish_reason=FinishReason.STOP,
            rewards={"exact_match": 1.0},
            reward=float(ticket_id % 7),
            turns=(Turn(start=0, end=int(length)),),
        )
        for length in sizes
    )
    return Group(
        ticket_id=ticket_id,
        server_id=server_id,
        prompt_ids=prompt_ids(ticket_id),
        image_grids=IMAGE_GRIDS,
        image_hashes=(image(ticket_id)[0],),
        lengths=sizes,
        token_ids=token_ids,
        source=np.zeros(total, np.uint8),
        logprobs=-random.random(total, np.float32),
        versions=np.full(total, version, np.int32),
        trajectories=records,
        timings=GroupTimings(generate_s=0.1, reward_s=0.0),
    )


CALL = ToolCall(name="crop", arguments='{"row": 1}', error_kind="tool", error="no", seconds=0.25)


def conversation(ticket_id: int) -> Group:
    """A group whose prompt an environment opened, and whose first trajectory it showed an image after a turn."""
    digest, data = image(ticket_id)
    shown = (
        ObservedMessage(
            role="tool", content=(TextPart(text="see"), ObservedImage(content_hash=digest, grid=(1, 2, 3)))
        ),
    )
    right = group(ticket_id, 0, "server-0", [9, 4])
    turns = (
        Turn(
            start=0,
            end=2,
            finish_reason=FinishReason.STOP,
            reward=0.5,
            state_key="0a",
            observation=shown,
            calls=(CALL,),
            info='{"hit": true}',
        ),
        Turn(start=6, end=9, finish_reason=FinishReason.LENGTH),
    )
    first = right.trajectories[0].model_copy(update={"turns": turns, "limit": "turns"})
    changes = {"opening": shown, "blobs": {digest: memoryview(data)}, "trajectories": (first, right.trajectories[1])}
    return right.model_copy(update=changes)


def is_right(received: Group) -> bool:
    """Compare a group with the one that its ticket demands; the time it took is free."""
    right = group(received.ticket_id, int(received.versions[0]), received.server_id)
    return encode(received.model_copy(update={"timings": right.timings})) == encode(right)


def hello(server_id: str, max_groups: int = 8) -> Hello:
    return Hello(
        server_id=server_id,
        session=f"session-of-{server_id}",
        host_id="elsewhere",
        engine="scripted",
        model_fingerprint=MODEL,
        processor_fingerprint=PROCESSOR,
        max_groups=max_groups,
        pid=1,
    )


def heartbeat(running: int = 1) -> ServerHeartbeat:
    zeros = dict.fromkeys(("version", "groups_queued", "groups_unacknowledged", "tokens_generated"), 0)
    return ServerHeartbeat(**zeros, groups_running=running, busy_s=1.0, uptime_s=2.0)


EXAMPLE_IMAGE = "ab" * 32


def example_tickets(image: bytes = b"png", columns: dict[str, Any] | None = None, answer: Any = "7") -> Tickets:
    right = ticket(7, 2)
    columns = {"level": {"score": Decimal("0.5")}} if columns is None else columns
    prompt = right.prompt.model_copy(update={"columns": columns, "answer": answer})
    requests = (
        TrajectoryRequest(prefix=(5, STOP)),
        TrajectoryRequest(greedy=True),
        *[TrajectoryRequest()] * (GROUP_SIZE - 2),
    )
    example = right.model_copy(update={"prompt": prompt, "requests": requests})
    return Tickets(tickets=(example,), blobs={EXAMPLE_IMAGE: memoryview(image)})


ENTRY = TensorEntry(name="w", dtype="bfloat16", shape=(2, 3), offset=0, nbytes=12, xxh3=(1 << 64) - 1)
CUDA = CudaMemory(handle=b"\x00", nbytes=64, offset=2, counter=b"/c", counter_offset=1, event=b"e", event_sync=True)
PARTIAL = PartialRollout(
    lengths=np.asarray([2, *[0] * (GROUP_SIZE - 1)], np.int32),
    token_ids=np.asarray([5, 6], np.int32),
    logprobs=np.asarray([-1.0, -0.5], np.float32),
    versions=np.asarray([2, 3], np.int32),
)
EXAMPLES: tuple[Wire, ...] = (
    hello("server-0"),
    Welcome(run_id="fuzz", incarnation="i", host_id="h", version=0, weights_port=1, heartbeat_s=2.0, timeout_s=30.0),
    Refusal(code=ErrorCode.MODEL_MISMATCH, reason="a and b", fix="same"),
    example_tickets(),
    group(7, 3, "server-0", [3, 0, 2]),
    group(7, 3, "server-0", []),
    conversation(7),
    Ack(ticket_ids=(1, 2)),
    TicketFailed(ticket_id=1, error_kind="engine", error_message="boom"),
    TicketReturned(ticket_id=7, partial=PARTIAL),
    Tickets(tickets=(ticket(7, 2).model_copy(update={"partial": PARTIAL}),)),
    heartbeat(),
    LearnerHeartbeat(version=1),
    Goodbye(reason="finished"),
    Error(code=ErrorCode.MALFORMED, reason="x", ticket_id=3),
    WeightManifest(version=4, publication="p", tensors=(ENTRY,), total_bytes=12, shm_path="/dev/shm/x"),
    LeaseGrant(fence=2),
    LeaseRecall(fence=2),
    LeaseReturn(fence=2, wake_s=0.5, sleep_s=0.25, sleep_bytes=1 << 30),
    WeightsLoaded(version=1, channel="shm", transfer_s=0.1, load_s=0.2),
    TransferRequest(version=3, publication="p", nonce="a1", channel="nccl", receivers=2),
    TransferStart(version=3, nonce="a1", port=7700),
    TransferStart(version=3, nonce="a2", memory=CUDA),
    TransferEnd(nonce="a1"),
    SourceRequest(
        version=1,
        publication="p",
        session="s",
        endpoint="tcp://127.0.0.1:1",
        failure=SourceFailure(server_id="b", reason="silent"),
    ),
    Source(version=1, server_id="b", endpoint="tcp://127.0.0.1:1", key="k" * 40, peer_keys=("k" * 40,)),
    ChunkRequest(version=1, publication="p", offset=0, nbytes=10),
    Chunk(version=1, offset=0, data=memoryview(b"0123456789")),
)
"""Messages, at least one of every kind."""
