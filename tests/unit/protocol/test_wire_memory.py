"""Messages without an end, of very many frames, or not read for long: what one connection can cost in memory."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq

from learner.network.ports import open_ports
from protocol import held
from protocol.codec import MIB, Limits, encode
from protocol.curve import make_keys, read_learner_keys, read_server_keys
from protocol.curve_auth import CurveAuthenticator
from protocol.errors import ErrorCode
from protocol.held import Allowance
from protocol.messages import (
    ControlFromLearner,
    ControlFromServer,
    LearnerHeartbeat,
    Tickets,
)
from protocol.reception import SKIPPED_AT_ONCE
from protocol.socket_options import CONTROL_QUEUES, become_curve_client
from protocol.sockets import BadMessage, LearnerSocket, Received, ServerSocket
from tests.rigs.fuzz import content
from tests.rigs.fuzz.raw_peer import RawPeer, Withholder, frame, frame_head, message
from tests.rigs.fuzz.rig import LearnerRig, small_config
from tests.rigs.waiting import wait_until

WAIT_S = 10.0
LIMITS = Limits(max_message_bytes=1 * MIB)
BIG_FRAMES = frame(bytes(256 * 1024), more=True)
TINY_FRAMES = frame(b"", more=True) * 50_000
MOST = 400 * MIB
"""What a peer may send in a test before it counts as unbounded; without a bound all of it arrives."""

pytestmark = pytest.mark.skipif(not held.kernel_counts(), reason="this system does not count a connection's bytes")


@contextmanager
def learner_socket(host: str = "127.0.0.1", **options: Any) -> Iterator[LearnerSocket]:
    arguments = {"linger_s": 0, **options}
    sock = LearnerSocket(f"tcp://{host}:0", ControlFromServer, LIMITS, setting="network.control_port", **arguments)
    try:
        yield sock
    finally:
        sock.close()


@contextmanager
def read_by_a_thread(sock: LearnerSocket) -> Iterator[list[Received | BadMessage]]:
    """As the exchange does: what there is, then a short wait."""
    heard: list[Received | BadMessage] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            received = sock.recv(0.05)
            if received is not None:
                heard.append(received)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield heard
    finally:
        done.set()
        thread.join()


def rss_mib() -> float:
    return psutil.Process().memory_info().rss / MIB


@pytest.fixture(autouse=True)
def _close(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every connection that a test has opened by hand."""
    opened: list[RawPeer] = []
    made = RawPeer.__init__

    def remember(peer: RawPeer, *arguments: Any) -> None:
        opened.append(peer)
        made(peer, *arguments)

    monkeypatch.setattr(RawPeer, "__init__", remember)
    yield
    for peer in opened:
        peer.close()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


# --- the learner's side -----------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
@pytest.mark.parametrize("flood", [BIG_FRAMES, TINY_FRAMES], ids=["big frames", "tiny frames"])
def test_a_message_without_an_end_costs_the_connection(flood: bytes, host: str, caplog: pytest.LogCaptureFixture):
    before = rss_mib()
    with learner_socket(host) as sock, read_by_a_thread(sock) as heard:
        peer, good = RawPeer.dial(sock.endpoint), RawPeer.dial(sock.endpoint)
        sent = peer.send_until_ended(flood, MOST)
        assert sent < MOST, "nobody stopped it"
        wait_until(lambda: sock.take_ended() == 1, "the connection's end to be counted")
        assert f"port {peer.sock.getsockname()[1]} is ended" in caplog.text
        assert rss_mib() - before < 0.8 * MOST
        good.send(message(encode(content.heartbeat())))
        wait_until(lambda: bool(heard), "another's message")
        assert not good.is_ended()


def test_three_times_the_limit_is_enough_to_be_found_out(caplog: pytest.LogCaptureFixture):
    """Long before a full queue of whole messages could weigh so much."""
    with learner_socket() as sock, read_by_a_thread(sock):
        peer = RawPeer.dial(sock.endpoint)
        peer.send_until_ended(BIG_FRAMES, 3 * LIMITS.max_message_bytes)
        wait_until(peer.is_ended, "its end")
        assert "of a message that does not end" in caplog.text


def test_a_message_that_ends_within_the_limit_passes_however_slowly():
    beat = encode(content.heartbeat())
    padding = bytes(LIMITS.max_message_bytes - len(beat[0]))
    whole = message([*beat, padding])
    with learner_socket() as sock, read_by_a_thread(sock) as heard:
        slow, busy = RawPeer.dial(sock.endpoint), RawPeer.dial(sock.endpoint)
        for start in range(0, len(whole), len(whole) // 20):
            slow.send(whole[start : start + len(whole) // 20])
            busy.send(message(beat))
            time.sleep(0.06)
        wait_until(lambda: sum(isinstance(one, BadMessage) for one in heard) == 1, "the long message")
        assert sock.take_ended() == 0
        assert not slow.is_ended()


def test_a_full_queue_of_whole_messages_waits_for_a_reader_that_is_at_work():
    number = CONTROL_QUEUES.receive + 10
    one = message([b"\xc1", bytes(LIMITS.max_message_bytes - 1)])
    with learner_socket() as sock:
        peer = RawPeer.dial(sock.endpoint)
        sending = threading.Thread(target=lambda: [peer.send(one) for _ in range(number)])
        sending.start()
        time.sleep(10 * held.LOOK_S)
        with read_by_a_thread(sock) as heard:
            wait_until(lambda: len(heard) == number, "all of them")
        sending.join()
        assert sock.take_ended() == 0


def test_nothing_is_unbounded_while_the_reader_is_at_work():
    with learner_socket() as sock:
        peer = RawPeer.dial(sock.endpoint)
        assert peer.send_until_ended(BIG_FRAMES, MOST) < MOST
        wait_until(lambda: sock.take_ended() == 1, "the connection's end to be counted")


def test_a_socket_that_is_never_empty_hides_no_message_without_an_end():
    with learner_socket() as sock:
        # Never found empty: there is always another's message.
        beat, done = message(encode(content.heartbeat())), threading.Event()
        busy, peer = [RawPeer.dial(sock.endpoint) for _ in range(3)], RawPeer.dial(sock.endpoint)
        floods = [threading.Thread(target=one.send_until_ended, args=(100 * beat, MOST)) for one in busy]
        for flood in floods:
            flood.start()
        sent: list[int] = []
        hostile = threading.Thread(target=lambda: sent.append(peer.send_until_ended(TINY_FRAMES, MOST)))
        hostile.start()
        deadline = time.monotonic() + WAIT_S
        while hostile.is_alive():
            assert time.monotonic() < deadline
            sock.recv()
        done.set()
        for one in busy:
            one.sock.shutdown(socket.SHUT_RDWR)
        for flood in floods:
            flood.join()
        assert sent[0] < Allowance.of(LIMITS, CONTROL_QUEUES, curve=False).queued


def test_frames_that_are_announced_and_do_not_come_cost_nothing():
    before = rss_mib()
    with learner_socket() as sock, read_by_a_thread(sock):
        peers = [RawPeer.dial(sock.endpoint) for _ in range(50)]
        for peer in peers:
            peer.send(frame_head(LIMITS.max_message_bytes, more=False) + b"x")
        time.sleep(4 * held.LOOK_S)
        assert rss_mib() - before < 25
        assert not any(peer.is_ended() for peer in peers)


@pytest.mark.parametrize("curve", [False, True], ids=["plain", "curve"])
def test_the_account_of_a_connection_is_exact(keys: Path, curve: bool):
    """Otherwise a good peer would be ended some day."""
    context, rng = zmq.Context(), np.random.default_rng(1)
    learner_keys = read_learner_keys(keys) if curve else None
    gate = CurveAuthenticator(context, learner_keys) if learner_keys else None
    with learner_socket(context=context, keys=learner_keys, gate=gate) as sock:
        if gate:
            gate.start()
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
        if curve:
            become_curve_client(peer, read_server_keys(keys))
        peer.connect(sock.endpoint)
        for _ in range(300):
            sizes = rng.choice([0, 1, 222, 223, 255, 256, 70_000], size=rng.integers(1, 6))
            peer.send_multipart([bytes(int(size)) for size in sizes])
            assert isinstance(sock.recv(WAIT_S), BadMessage)
        [(descriptor, connection)] = sock._held._connections.items()
        passed = sock._held._passed(descriptor, connection)
        assert passed is not None
        handshake = passed - connection.taken
        assert 0 < handshake < 1000
        assert connection.taken > 5 * MIB
        peer.close()
        if gate:
            gate.close()
    context.term()


def test_with_keys_a_message_without_an_end_costs_the_connection_too(keys: Path):
    context = zmq.Context()
    learner_keys = read_learner_keys(keys)
    gate = CurveAuthenticator(context, learner_keys)
    with learner_socket(context=context, keys=learner_keys, gate=gate) as sock:
        gate.start()
        relay = Withholder(sock.endpoint, 8 * MIB)
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
        become_curve_client(peer, read_server_keys(keys))
        peer.connect(relay.endpoint)
        peer.send_multipart([bytes(256 * 1024)] * 40)
        with read_by_a_thread(sock) as heard:
            assert relay.hung_up.wait(WAIT_S)
        assert not heard
        assert sock.take_ended() == 1
        peer.close()
        relay.close()
        gate.close()
    context.term()


def test_a_descriptor_that_is_used_again_starts_a_new_account():
    beat = message(encode(content.heartbeat()))
    with learner_socket() as sock, read_by_a_thread(sock) as heard:
        for number in range(20):
            peer = RawPeer.dial(sock.endpoint)
            peer.send(beat)
            wait_until(lambda n=number: len(heard) == n + 1, "the message")  # type: ignore[misc]
            [connection] = sock._held._connections.values()
            assert connection.taken == len(beat)
            peer.close()
            wait_until(lambda: sock._held.looks > 0 and not sock._held._connections, "its end")


def test_a_system_that_does_not_count_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(held, "kernel_counts", lambda: False)
    with learner_socket() as sock:
        assert "unfinished messages are not bounded" in caplog.text
        peer = RawPeer.dial(sock.endpoint)
        peer.send(message(encode(content.heartbeat())))
        assert isinstance(sock.recv(WAIT_S), Received)


# --- frames -----------------------------------------------------------------------------------------


def test_too_many_frames_are_answered_and_the_next_message_is_read():
    with learner_socket() as sock:
        peer = RawPeer.dial(sock.endpoint)
        peer.send(message([b"\xc1"] * (LIMITS.max_frames + 1000)) + message(encode(content.heartbeat())))
        bad = sock.recv(WAIT_S)
        assert isinstance(bad, BadMessage)
        assert bad.error.code is ErrorCode.TOO_LARGE
        assert isinstance(sock.recv(WAIT_S), Received)
        assert sock.take_ended() == 0


def test_a_message_of_very_many_frames_is_skipped_in_pieces_and_costs_the_connection():
    number = 5 * SKIPPED_AT_ONCE
    with learner_socket() as sock:
        peer, good = RawPeer.dial(sock.endpoint), RawPeer.dial(sock.endpoint)
        peer.send(frame(b"", more=True) * number + frame(b"", more=False))
        bad = sock.recv(WAIT_S)
        assert isinstance(bad, BadMessage)
        assert bad.error.code is ErrorCode.TOO_LARGE
        wait_until(peer.is_ended, "its end")
        good.send(message(encode(content.heartbeat())))
        looks = 0
        while (received := sock.recv(0.05)) is None:
            looks += 1
            assert looks < 20
        assert isinstance(received, Received)
        assert looks >= number // SKIPPED_AT_ONCE - 2, "other work was possible in between"
        assert sock.take_ended() == 1


# --- a server's side --------------------------------------------------------------------------------


async def listen(sock: ServerSocket, until: Callable[[], bool]) -> list[object]:
    heard: list[object] = []
    deadline = time.monotonic() + WAIT_S
    while not until():
        assert time.monotonic() < deadline
        received = await sock.recv(0.2)
        if received is not None:
            heard.append(received)
    return heard


@pytest.mark.parametrize("flood", [BIG_FRAMES, TINY_FRAMES], ids=["big frames", "tiny frames"])
def test_a_learner_that_ends_no_message_is_hung_up_on(flood: bytes):
    listener = socket.create_server(("127.0.0.1", 0))
    sent: list[int] = []

    def learner() -> None:
        peer = RawPeer(listener.accept()[0], b"ROUTER")
        sent.append(peer.send_until_ended(flood, MOST))
        peer.close()
        again = RawPeer(listener.accept()[0], b"ROUTER")
        again.send(message(encode(LearnerHeartbeat(version=1, step=1))))
        wait_until(again.is_ended, "the server to close its socket")
        again.close()

    async def scenario() -> list[object]:
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        sock = ServerSocket(endpoint, ControlFromLearner, LIMITS, linger_s=0)
        thread = threading.Thread(target=learner)
        thread.start()
        heard: list[object] = []
        while not heard:
            heard += [one for one in [await sock.recv(WAIT_S)] if one is not None]
        assert sock.take_ended() == 1
        sock.close()
        thread.join()
        return heard

    heard = asyncio.run(scenario())
    listener.close()
    assert sent[0] < MOST
    assert heard == [LearnerHeartbeat(version=1, step=1)], "it came back"


def test_with_keys_a_learner_that_ends_no_message_is_hung_up_on(keys: Path):
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    secret = read_learner_keys(keys)
    router.curve_server, router.curve_secretkey = True, secret.secret
    port = router.bind_to_random_port("tcp://127.0.0.1")
    relay = Withholder(f"tcp://127.0.0.1:{port}", 8 * MIB, backwards=True)

    async def scenario() -> None:
        sock = ServerSocket(relay.endpoint, ControlFromLearner, LIMITS, keys=read_server_keys(keys), linger_s=0)
        await sock.send(content.hello("server"), WAIT_S)
        identity, *_ = router.recv_multipart()
        router.send_multipart([identity, *[bytes(256 * 1024)] * 40])
        assert await listen(sock, relay.hung_up.is_set) == []
        assert sock.take_ended() == 1
        sock.close()

    asyncio.run(scenario())
    relay.close()
    context.destroy(linger=0)


@pytest.mark.parametrize("pause_s", [0.0, 0.05])
def test_a_large_message_of_tickets_passes(pause_s: float):
    """60 MiB of images, at once or slowly, to a server whose limit is just above it."""
    listener = socket.create_server(("127.0.0.1", 0))
    blobs = {content.image(number)[0]: memoryview(bytes(3 * MIB)) for number in range(20)}
    whole = message([bytes(part) for part in encode(Tickets(tickets=(content.ticket(1, 0),), blobs=blobs))])

    def learner() -> None:
        peer = RawPeer(listener.accept()[0], b"ROUTER")
        for start in range(0, len(whole), 2 * MIB):
            peer.send(whole[start : start + 2 * MIB])
            time.sleep(pause_s)
        wait_until(peer.is_ended, "the server to close its socket")
        peer.close()

    async def scenario() -> object:
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        limits = Limits(max_message_bytes=len(whole))
        sock = ServerSocket(endpoint, ControlFromLearner, limits, linger_s=0)
        thread = threading.Thread(target=learner)
        thread.start()
        message = None
        while message is None:
            message = await sock.recv(1.0)
        assert sock.take_ended() == 0
        sock.close()
        thread.join()
        return message

    arrived = asyncio.run(scenario())
    listener.close()
    assert isinstance(arrived, Tickets)
    assert len(arrived.blobs) == 20


# --- the learner as a whole -------------------------------------------------------------------------


def test_the_learner_counts_it_and_goes_on(tmp_path: Path):
    logging.disable(logging.CRITICAL)
    rig = LearnerRig(small_config(), tmp_path)
    rig.start()
    try:
        for endpoint in (rig.config.control_endpoint, rig.config.weights_endpoint):
            assert RawPeer.dial(endpoint).send_until_ended(TINY_FRAMES, 4 * MOST) < 100 * MIB
        wait_until(lambda: rig.exchange.errors["unfinished_message"] == 2, "both to be counted")
        rig.exchange.check()
    finally:
        rig.close()
        logging.disable(logging.NOTSET)


def test_the_largest_group_that_a_ticket_allows_gets_in():
    config = small_config()
    context = zmq.Context()
    ports = open_ports(config, context)
    try:
        size, length = config.batch.group_size, config.data.max_response_length
        right = content.group(1, 0, "server")
        total = size * length
        columns = {name: np.zeros(total, np.int32) for name in ("token_ids", "versions", "kv_versions")}
        group = right.model_copy(
            update={
                **columns,
                "prompt_ids": np.zeros(config.data.max_prompt_length, np.int32),
                "loss_mask": np.ones(total, np.uint8),
                "logprobs": np.zeros(total, np.float32),
                "lengths": np.full(size, length, np.int32),
                "trajectories": right.trajectories[:1] * size,
            }
        )
        frames = encode(group)
        arrays = sum(memoryview(frame).nbytes for frame in frames[1:])
        inbound = ports.control._inbound
        assert inbound.max_header_bytes + arrays <= inbound.max_message_bytes
        assert inbound.max_message_bytes < ports.control.limits.max_message_bytes / 4
        assert ports.weights._inbound.max_message_bytes == inbound.max_header_bytes
    finally:
        ports.close()
        context.term()


def test_an_allowance_is_little_more_than_the_limits_that_it_follows_from():
    allowance = Allowance.of(LIMITS, CONTROL_QUEUES, curve=True)
    assert LIMITS.max_message_bytes < allowance.unfinished < 1.3 * LIMITS.max_message_bytes
    assert allowance.queued < (CONTROL_QUEUES.receive + 3) * allowance.unfinished
