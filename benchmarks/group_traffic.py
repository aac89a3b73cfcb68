"""Traffic of the benchmark of groups, and the rollout server's side of it: a process that only sends and counts.

A group is 8 completions of 2,048 tokens; its ticket carries one image of 500 kB. All were made beforehand.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection

import msgpack
import numpy as np
import zmq

from asyncrl.journal.writer import TicketSlot
from asyncrl.processing.encoded_prompt import EncodedPrompt
from learner.groups.ticket import PreparedTicket
from protocol.codec import encode
from protocol.messages import (
    ChatMessage,
    FinishReason,
    Group,
    GroupTimings,
    Hello,
    ImagePart,
    Prompt,
    Sampling,
    ServerHeartbeat,
    TextPart,
    Ticket,
    TicketKind,
    TrajectoryRecord,
    TrajectoryStatus,
    Turn,
)

GROUP_SIZE, TOKENS, IMAGE_BYTES, PROMPT_TOKENS = 8, 2048, 500_000, 1024
VOCABULARY = 152_000
BANNED = tuple(range(151_643, 151_657))
"""Banned ids, as many as a Qwen2-VL has."""
KINDS = 64
"""Different images and groups; they are used in turn."""
MARK = 2**62
"""A ticket id whose eight bytes the client overwrites in an encoded group."""


@lru_cache(maxsize=KINDS)
def image(kind: int) -> tuple[str, bytes]:
    """Content hash and bytes."""
    data = np.random.default_rng(kind).bytes(IMAGE_BYTES)
    return hashlib.sha256(data).hexdigest(), data


@lru_cache(maxsize=KINDS)
def measured(kind: int) -> EncodedPrompt:
    ids = np.random.default_rng(kind).integers(0, VOCABULARY, PROMPT_TOKENS).astype(np.int32)
    return EncodedPrompt("row", ids, np.zeros_like(ids), np.asarray([[1, 56, 72]], np.int32), (image(kind)[0],))


@lru_cache(maxsize=KINDS)
def ticket(kind: int) -> Ticket:
    """Made beforehand, but for its numbers."""
    question = TextPart(text="How many of the objects in the image are larger than the one on the left? " * 4)
    prompt = Prompt(
        row_id=f"rows.parquet:{kind}",
        messages=(ChatMessage(role="user", content=(ImagePart(), question)),),
        image_hashes=(image(kind)[0],),
        answer="17",
        columns={"difficulty": 3, "source": "benchmark"},
    )
    sampling = Sampling(max_new_tokens=TOKENS, stop_token_ids=(151_645,), banned_token_ids=BANNED)
    numbers = {"ticket_id": 0, "seed": 0, "min_version": 0}
    return Ticket(kind=TicketKind.TRAIN, prompt=prompt, group_size=GROUP_SIZE, sampling=sampling, **numbers)


def prepared(slot: TicketSlot) -> PreparedTicket:
    kind = slot.ticket_id % KINDS
    numbers = {"ticket_id": slot.ticket_id, "seed": slot.ticket_id, "min_version": slot.version}
    digest, data = image(kind)
    return PreparedTicket(ticket(kind).model_copy(update=numbers), {digest: data}, slot, measured(kind))


def group(kind: int, version: int = 0, ticket_id: int = MARK) -> Group:
    random = np.random.default_rng(kind)
    total = GROUP_SIZE * TOKENS
    record = TrajectoryRecord(
        status=TrajectoryStatus.TRUNCATED,
        finish_reason=FinishReason.LENGTH,
        rewards={"exact_match": 1.0},
        reward=1.0,
        turns=(Turn(start=0, end=TOKENS),),
    )
    return Group(
        ticket_id=ticket_id,
        server_id="benchmark",
        prompt_ids=measured(kind).token_ids,
        image_grids=measured(kind).image_grids,
        image_hashes=measured(kind).image_hashes,
        lengths=np.full(GROUP_SIZE, TOKENS, np.int32),
        token_ids=random.integers(0, BANNED[0], total).astype(np.int32),
        source=np.zeros(total, np.uint8),
        logprobs=-random.random(total, np.float32),
        versions=np.full(total, version, np.int32),
        trajectories=(record,) * GROUP_SIZE,
        timings=GroupTimings(generate_s=20.0, reward_s=0.2),
    )


@dataclass
class _Round:
    """Remaining work of a round. The clock starts with the acknowledgement of the last group of the warm-up."""

    to_answer: int
    to_acknowledge: int
    timed: int
    """Groups, the last ones."""
    started: float = 0.0
    cpu: float = 0.0
    milliseconds: tuple[float, float] | None = None
    """Per group: wall clock, processor time of this process."""

    def acknowledge(self, groups: int) -> None:
        self.to_acknowledge -= groups
        now, cpu = time.perf_counter(), time.process_time()
        if not self.started and self.to_acknowledge <= self.timed:
            self.timed, self.started, self.cpu = self.to_acknowledge, now, cpu
        if not self.to_acknowledge:
            self.milliseconds = 1000 * (now - self.started) / self.timed, 1000 * (cpu - self.cpu) / self.timed


class Client:
    """Answers each ticket with a group made beforehand; holds tickets back until it is told how many to answer.

    A round ends when it holds all of its tickets again: nothing travels while another arm has its turn.
    """

    def __init__(self, pipe: Connection, endpoint: str, plain: bool, in_flight: int):
        self._pipe, self._plain, self._in_flight = pipe, plain, in_flight
        self._socket = zmq.Context().socket(zmq.DEALER)
        self._socket.connect(endpoint)
        self._groups = [encode(group(kind)) for kind in range(KINDS)]
        self._mark_at = self._groups[0][0].index(MARK.to_bytes(8, "big"))  # type: ignore[union-attr]
        self._held: list[tuple[int, int]] = []
        self._round: _Round | None = None
        self._versions: dict[int, np.ndarray] = {}

    def run(self, hello: list[bytes | memoryview]) -> None:
        self._socket.send_multipart(hello)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._pipe.fileno(), zmq.POLLIN)
        beat_at = 0.0
        while True:
            ready = dict(poller.poll(1000))
            if self._pipe.fileno() in ready:
                order: tuple[int, int] | None = self._pipe.recv()
                if order is None:
                    return
                self._round = _Round(to_answer=sum(order), to_acknowledge=sum(order), timed=order[1])
            if self._socket in ready:
                self._listen()
            if self._round is not None:
                self._answer(self._round)
                if self._round.milliseconds and len(self._held) == self._in_flight:
                    self._pipe.send(self._round.milliseconds)
                    self._round = None
            if not self._plain and time.monotonic() - beat_at > 1:
                beat_at = time.monotonic()
                self._socket.send_multipart(_heartbeat(len(self._held)))

    def _listen(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            tickets, acknowledged = (_plain_header if self._plain else _header)(frames[0].buffer)
            self._held += tickets
            if self._round is not None and acknowledged:
                self._round.acknowledge(acknowledged)

    def _answer(self, round_: _Round) -> None:
        while self._held and round_.to_answer:
            ticket_id, version = self._held.pop(0)
            round_.to_answer -= 1
            header, *columns, _ = self._groups[ticket_id % KINDS]
            patched = bytearray(header)
            patched[self._mark_at : self._mark_at + 8] = ticket_id.to_bytes(8, "big")
            versions = self._versions.setdefault(version, np.full(GROUP_SIZE * TOKENS, version, np.int32))
            self._socket.send_multipart([patched, *columns, versions], copy=False)


def _header(header: memoryview) -> tuple[list[tuple[int, int]], int]:
    """New tickets with their versions, and how many groups are acknowledged."""
    fields = msgpack.unpackb(header)
    tickets = [(ticket["ticket_id"], ticket["min_version"]) for ticket in fields.get("tickets", ())]
    if fields["type"] == "error":
        raise RuntimeError(fields["reason"])
    return tickets, len(fields["ticket_ids"]) if fields["type"] == "ack" else 0


def _plain_header(header: memoryview) -> tuple[list[tuple[int, int]], int]:
    acknowledged, first, count = struct.unpack_from("<3Q", header)
    return [(ticket_id, 0) for ticket_id in range(first, first + count)], acknowledged


def _heartbeat(held: int) -> list[bytes | memoryview]:
    beat = dict.fromkeys(("groups_queued", "groups_unacknowledged", "tokens_generated"), 0)
    return encode(ServerHeartbeat(version=0, groups_running=held, busy_s=1.0, uptime_s=1.0, **beat))


def client_process(pipe: Connection, endpoint: str, plain: bool, in_flight: int) -> None:
    hello = Hello(
        server_id="benchmark",
        session="benchmark",
        host_id="elsewhere",
        engine="benchmark",
        model_fingerprint="m",
        processor_fingerprint="p",
        max_groups=in_flight,
        pid=os.getpid(),
    )
    Client(pipe, endpoint, plain, in_flight).run(encode(hello))
