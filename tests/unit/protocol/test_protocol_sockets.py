"""Real sockets over loopback: a ROUTER that survives anything, a DEALER for asyncio, where they may bind."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import zmq
import zmq.asyncio

from asyncrl.launch.drawn_ports import free_port
from protocol.codec import Limits, decode, encode
from protocol.endpoints import BindError, InsecureBindError, PortInUseError, host_id
from protocol.errors import ErrorCode
from protocol.handshake import check_hello, refusal_for_undecodable_hello
from protocol.messages import (
    PROTOCOL_MAJOR,
    Ack,
    Chunk,
    ControlFromLearner,
    ControlFromServer,
    Error,
    Hello,
    LearnerHeartbeat,
    Refusal,
    ServerHeartbeat,
    Welcome,
)
from protocol.socket_options import Queues
from protocol.sockets import BadMessage, Delivery, LearnerSocket, Received, SendTimeout, ServerSocket

LIMITS = Limits(max_message_bytes=1 << 20)
WAIT_S = 5.0
HELLO = Hello(
    server_id="server-0",
    session="s1",
    host_id="h",
    engine="hf",
    model_fingerprint="model-a",
    processor_fingerprint="processor-a",
    max_groups=4,
    pid=1,
)
WELCOME = Welcome(run_id="r", incarnation="i", host_id="h", version=0, weights_port=1, heartbeat_s=1.0, timeout_s=5.0)


@pytest.fixture
def learner() -> Iterator[LearnerSocket]:
    sock = LearnerSocket("tcp://127.0.0.1:0", ControlFromServer, LIMITS, setting="network.control_port", linger_s=0)
    yield sock
    sock.close()


@pytest.fixture
def raw(learner: LearnerSocket) -> Iterator[zmq.Socket]:
    sock = zmq.Context.instance().socket(zmq.DEALER)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
    sock.connect(learner.endpoint)
    yield sock
    sock.close()


def pack(value: object) -> bytes:
    packed = msgpack.packb(value)
    assert packed is not None
    return packed


def answer_to(raw: zmq.Socket, learner: LearnerSocket, frames: list[bytes]) -> object:
    """What a peer hears that sends `frames`, which must be bad."""
    raw.send_multipart(frames)
    assert isinstance(learner.recv(WAIT_S), BadMessage)
    return decode(raw.recv_multipart(), ControlFromLearner, LIMITS)


def test_hello_and_welcome_over_loopback(learner: LearnerSocket):
    async def server() -> object:
        sock = ServerSocket(learner.endpoint, ControlFromLearner, LIMITS)
        await sock.send(HELLO, WAIT_S)
        received = await asyncio.to_thread(learner.recv, WAIT_S)
        assert isinstance(received, Received)
        assert received.message == HELLO
        assert learner.send(received.identity, WELCOME) is Delivery.SENT
        answer = await sock.recv(WAIT_S)
        assert (sock.counters.messages_in, sock.counters.messages_out) == (1, 1)
        assert sock.counters.bytes_out == learner.counters.bytes_in > 0
        sock.close()
        return answer

    assert asyncio.run(server()) == WELCOME
    assert learner.counters.messages_out == 1


def test_garbage_is_answered_and_a_valid_peer_still_works(learner: LearnerSocket, raw: zmq.Socket):
    for garbage, code in (
        ([b""], ErrorCode.MALFORMED),
        ([b"\xc1\xc1", b"x" * 1000], ErrorCode.MALFORMED),
        ([os.urandom(500) for _ in range(20)], ErrorCode.MALFORMED),
        ([b"\x80"] * 5000, ErrorCode.TOO_LARGE),
        ([b"x" * 600_000, b"y" * 600_000], ErrorCode.TOO_LARGE),
        ([pack({"type": "new_thing"})], ErrorCode.UNKNOWN_TYPE),
        ([bytes(f) for f in encode(Ack(ticket_ids=()))], ErrorCode.WRONG_DIRECTION),
    ):
        answer = answer_to(raw, learner, garbage)
        assert isinstance(answer, Error)
        assert answer.code is code
        assert answer.reason
    assert learner.counters.errors == {
        ErrorCode.MALFORMED: 3,
        ErrorCode.TOO_LARGE: 2,
        ErrorCode.UNKNOWN_TYPE: 1,
        ErrorCode.WRONG_DIRECTION: 1,
    }
    raw.send_multipart(encode(HELLO))
    received = learner.recv(WAIT_S)
    assert isinstance(received, Received)
    assert received.message == HELLO


def test_peers_that_do_not_speak_zeromq_or_send_a_huge_frame_do_no_harm(learner: LearnerSocket, raw: zmq.Socket):
    host, port = learner.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(2000))
    oversized = zmq.Context.instance().socket(zmq.DEALER)
    oversized.setsockopt(zmq.LINGER, 0)
    oversized.connect(learner.endpoint)
    oversized.send(b"z" * (LIMITS.max_message_bytes + 1))
    while (bad := learner.recv(0.3)) is not None:  # ZeroMQ takes some of this for its oldest protocol
        assert isinstance(bad, BadMessage)
        assert learner.counters.bytes_in < LIMITS.max_message_bytes
    oversized.close()
    raw.send_multipart(encode(HELLO))
    assert isinstance(learner.recv(WAIT_S), Received)


def test_errors_are_never_answered_with_errors(learner: LearnerSocket, raw: zmq.Socket):
    raw.send(pack({"type": "error", "code": "from the future"}))
    bad = learner.recv(WAIT_S)
    assert isinstance(bad, BadMessage)
    assert bad.answer is None
    assert not raw.poll(100)


def test_a_hello_of_another_protocol_is_refused_with_a_reason(learner: LearnerSocket, raw: zmq.Socket):
    strange = pack({"type": "hello", "protocol_major": 9, "server_id": "s9", "colour": "red"})
    refusal = answer_to(raw, learner, [strange])
    assert isinstance(refusal, Refusal)
    assert refusal.code is ErrorCode.PROTOCOL_VERSION
    assert "9.0" in refusal.reason
    assert "s9" in refusal.reason
    broken = answer_to(raw, learner, [pack({"type": "hello", "protocol_major": PROTOCOL_MAJOR})])
    assert isinstance(broken, Error)


def test_undecodable_hello_is_told_from_other_messages():
    def frames(**fields: object) -> list[bytes]:
        return [pack(fields)]

    assert refusal_for_undecodable_hello(frames(type="hello", protocol_major=1)) is not None
    assert refusal_for_undecodable_hello(frames(type="hello", protocol_major=PROTOCOL_MAJOR)) is None
    assert refusal_for_undecodable_hello(frames(type="hello", protocol_major="1")) is None
    assert refusal_for_undecodable_hello(frames(type="group", protocol_major=1)) is None
    assert refusal_for_undecodable_hello([b"\xc1"]) is None
    assert refusal_for_undecodable_hello([]) is None


def test_check_hello():
    def check(hello: Hello, live: dict[str, str] | None = None) -> Refusal | None:
        return check_hello(
            hello,
            model_fingerprint="model-a",
            processor_fingerprint="processor-a",
            live_server_ids=live or {},
        )

    assert check(HELLO) is None
    assert check(HELLO.model_copy(update={"protocol_minor": 7})) is None
    assert check(HELLO, {"server-0": "s1", "server-1": "s2"}) is None, "the same session is a reconnection"
    for changes, live, code, values in (
        ({"protocol_major": 1}, {}, ErrorCode.PROTOCOL_VERSION, ("1.0", f"{PROTOCOL_MAJOR}.0")),
        ({"model_fingerprint": "model-b"}, {}, ErrorCode.MODEL_MISMATCH, ("model-b", "model-a")),
        ({"processor_fingerprint": "pb"}, {}, ErrorCode.PROCESSOR_MISMATCH, ("pb", "processor-a")),
        ({}, {"server-0": "other"}, ErrorCode.DUPLICATE_SERVER, ("s1", "pid 1")),
    ):
        refusal = check(HELLO.model_copy(update=changes), live)
        assert refusal is not None
        assert refusal.code is code
        assert "server-0" in refusal.reason
        assert all(value in refusal.reason for value in values)
        assert refusal.fix
        assert "other" not in refusal.reason


def test_sending_to_a_peer_that_has_gone_is_reported(learner: LearnerSocket, raw: zmq.Socket):
    assert learner.send(b"nobody", LearnerHeartbeat(version=0, step=0)) is Delivery.UNREACHABLE
    raw.send_multipart(encode(HELLO))
    received = learner.recv(WAIT_S)
    assert isinstance(received, Received)
    raw.close()
    deadline = time.monotonic() + WAIT_S
    while learner.send(received.identity, WELCOME) is not Delivery.UNREACHABLE:
        assert time.monotonic() < deadline, "the closed peer still counts as reachable"
        time.sleep(0.01)
    assert learner.counters.undelivered == 2


def test_a_peer_that_does_not_read_fills_its_queue_and_blocks_nobody():
    learner = LearnerSocket("tcp://127.0.0.1:0", ControlFromServer, setting="port", queues=Queues(5, 5), linger_s=0)
    slow = zmq.Context.instance().socket(zmq.DEALER)
    slow.setsockopt(zmq.RCVHWM, 5)
    slow.setsockopt(zmq.LINGER, 0)
    slow.connect(learner.endpoint)
    slow.send_multipart(encode(HELLO))
    received = learner.recv(WAIT_S)
    assert isinstance(received, Received)
    bulky = Chunk(version=1, offset=0, data=memoryview(bytes(1_000_000)))
    outcomes: list[Delivery] = []
    deadline = time.monotonic() + WAIT_S
    while outcomes[-20:] != 20 * [Delivery.QUEUE_FULL]:  # the system's buffers take some more after the first
        assert time.monotonic() < deadline, outcomes
        outcomes.append(learner.send(received.identity, bulky))
        time.sleep(0.005)
    assert 5 <= outcomes.count(Delivery.SENT) < 100
    assert learner.counters.undelivered == outcomes.count(Delivery.QUEUE_FULL)
    slow.close()
    learner.close()


def test_recv_returns_none_when_nothing_comes(learner: LearnerSocket):
    assert learner.recv() is None
    assert learner.recv(0.02) is None


def test_a_server_without_learner_times_out_and_says_what_it_waited_for():
    async def lonely() -> None:
        sock = ServerSocket(f"tcp://127.0.0.1:{free_port()}", ControlFromLearner, linger_s=0)
        assert await sock.recv(0.02) is None
        with pytest.raises(SendTimeout, match=r"waited 0\.05 s to send `hello` to the learner at tcp://"):
            await sock.send(HELLO, 0.05)
        assert sock.counters.undelivered == 1
        sock.close()

    asyncio.run(lonely())


async def send_until_it_fails(sock: ServerSocket) -> None:
    """ZeroMQ needs a moment to notice that a connection has gone."""
    for _ in range(100):
        await sock.send(HELLO, 0.1)
        await asyncio.sleep(0.01)


def test_a_server_survives_a_learner_restart_on_the_same_port():
    async def scenario() -> None:
        port = free_port()
        endpoint = f"tcp://127.0.0.1:{port}"
        sock = ServerSocket(endpoint, ControlFromLearner, linger_s=0)
        for _ in range(2):
            learner = LearnerSocket(endpoint, ControlFromServer, setting="port", linger_s=0)
            await sock.send(HELLO, WAIT_S)
            received = await asyncio.to_thread(learner.recv, WAIT_S)
            assert isinstance(received, Received)
            learner.close()
            with pytest.raises(SendTimeout):
                await send_until_it_fails(sock)
        sock.close()

    asyncio.run(scenario())


def test_cancelled_receives_lose_no_message(learner: LearnerSocket):
    async def scenario() -> list[int]:
        sock = ServerSocket(learner.endpoint, ControlFromLearner)
        await sock.send(HELLO, WAIT_S)
        received = await asyncio.to_thread(learner.recv, WAIT_S)
        assert isinstance(received, Received)
        steps = []
        for step in range(50):
            learner.send(received.identity, LearnerHeartbeat(version=0, step=step))
            impatient = asyncio.create_task(sock.recv(WAIT_S))
            await asyncio.sleep(0.0005 * (step % 4))
            impatient.cancel()
            result = (await asyncio.gather(impatient, return_exceptions=True))[0]
            if isinstance(result, LearnerHeartbeat):
                steps.append(result.step)
        while isinstance(message := await sock.recv(0.2), LearnerHeartbeat):
            steps.append(message.step)
        sock.close()
        return steps

    assert asyncio.run(scenario()) == list(range(50))


def test_bad_messages_reach_the_server_as_data():
    async def scenario() -> None:
        router = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        sock = ServerSocket(f"tcp://127.0.0.1:{port}", ControlFromLearner)
        await sock.send(HELLO, WAIT_S)
        identity, *_ = await router.recv_multipart()
        await router.send_multipart([identity, b"\xc1"])
        bad = await sock.recv(WAIT_S)
        assert isinstance(bad, BadMessage)
        assert isinstance(bad.answer, Error)
        assert sock.counters.errors == {ErrorCode.MALFORMED: 1}
        await router.send_multipart([identity, *encode(WELCOME)])
        assert await sock.recv(WAIT_S) == WELCOME
        router.close()
        sock.close()

    asyncio.run(scenario())


def test_server_heartbeats_from_many_tasks_stay_whole(learner: LearnerSocket):
    def heartbeat(index: int) -> ServerHeartbeat:
        return ServerHeartbeat(
            version=index,
            groups_queued=0,
            groups_running=0,
            groups_unacknowledged=0,
            tokens_generated=0,
            busy_s=0,
            uptime_s=0,
        )

    async def scenario() -> None:
        sock = ServerSocket(learner.endpoint, ControlFromLearner)
        await asyncio.gather(*(sock.send(heartbeat(i), WAIT_S) for i in range(30)))
        sock.close()

    asyncio.run(scenario())
    versions = set()
    while isinstance(received := learner.recv(0.3), Received):
        assert isinstance(received.message, ServerHeartbeat)
        versions.add(received.message.version)
    assert versions == set(range(30))


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "192.0.2.1", "[::]"])
def test_public_addresses_are_refused_unless_insecure(host: str):
    with pytest.raises(InsecureBindError) as caught:
        LearnerSocket(f"tcp://{host}:0", ControlFromServer, setting="network.control_port")
    assert "network.host=127.0.0.1" in str(caught.value)
    assert "network.insecure=true" in str(caught.value)


def test_insecure_allows_a_public_address():
    sock = LearnerSocket("tcp://0.0.0.0:0", ControlFromServer, setting="network.control_port", insecure=True)
    assert sock.endpoint.startswith("tcp://0.0.0.0:")
    sock.close()


def test_localhost_is_loopback():
    sock = LearnerSocket("tcp://localhost:0", ControlFromServer, setting="network.control_port")
    assert sock.endpoint.startswith("tcp://127.0.0.1:")
    sock.close()


def test_a_busy_port_names_the_setting(learner: LearnerSocket):
    with pytest.raises(PortInUseError) as caught:
        LearnerSocket(learner.endpoint, ControlFromServer, setting="network.weights_port")
    message = str(caught.value)
    host, port = learner.endpoint.removeprefix("tcp://").split(":")
    assert f"port {port} on {host} is in use by another process" in message
    assert "set network.weights_port" in message


@pytest.mark.parametrize("endpoint", ["127.0.0.1:80", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "ipc:///tmp/x"])
def test_other_endpoints_are_refused(endpoint: str):
    with pytest.raises(BindError, match="is not an endpoint"):
        LearnerSocket(endpoint, ControlFromServer, setting="port")


def test_an_address_of_another_machine_cannot_be_bound():
    with pytest.raises(BindError, match=r"network\.host"):
        LearnerSocket("tcp://192.0.2.1:0", ControlFromServer, setting="network.control_port", insecure=True)


def test_host_id_is_equal_across_processes_and_differs_by_file_system(tmp_path: Path):
    code = "from protocol.endpoints import host_id; print(host_id())"
    root = Path(__file__).parents[3]
    other = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True, timeout=60
    )
    assert other.stdout.strip() == host_id()
    assert host_id() != host_id(Path("/proc"))
    missing = tmp_path / "missing"
    assert host_id(missing) != host_id(missing), "no shared memory: equal to nobody's"
