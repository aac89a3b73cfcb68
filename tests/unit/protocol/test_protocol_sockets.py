"""Real sockets over loopback: a ROUTER that survives anything, a DEALER for asyncio, where they may bind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from asyncrl.launch.ports import free_port
from protocol.codec import Limits
from protocol.curve import HandshakeEvents
from protocol.endpoints import BindError, PortInUseError, host_id
from protocol.errors import ErrorCode
from protocol.handshake import MAX_ACCOUNTS, PeerBudget, PeerLimits, check_hello
from protocol.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Ack,
    Chunk,
    ControlFromLearner,
    ControlFromServer,
    Error,
    Hello,
    LearnerHeartbeat,
    Refusal,
    Welcome,
)
from protocol.sockets import BadMessage, Delivery, LearnerSocket, Queues, Received, SendTimeout, ServerSocket
from tests.rigs.fuzz import content
from tests.rigs.fuzz.mutations import frames_of, pack
from tests.rigs.fuzz.peers import Peer
from tests.rigs.tiny import ROOT
from tests.rigs.waiting import wait_until

LIMITS = Limits(max_message_bytes=1 << 20)
WAIT_S = 5.0
HELLO = content.hello("server-0")
WELCOME = Welcome(run_id="r", incarnation="i", host_id="h", version=0, weights_port=1, heartbeat_s=1.0, timeout_s=5.0)


@pytest.fixture
def learner() -> Iterator[LearnerSocket]:
    sock = LearnerSocket("tcp://127.0.0.1:0", ControlFromServer, LIMITS, setting="network.control_port", linger_s=0)
    yield sock
    sock.close()


@pytest.fixture
def peer(learner: LearnerSocket) -> Iterator[Peer]:
    opened = Peer(learner.endpoint)
    yield opened
    opened.socket.close(linger=0)


def answer_to(peer: Peer, learner: LearnerSocket, frames: list[bytes]) -> object:
    """What a peer hears that sends `frames`, which must be bad."""
    peer.send(frames)
    assert isinstance(learner.recv(WAIT_S), BadMessage)
    return peer.receive(WAIT_S)


def heard(peer: Peer, learner: LearnerSocket) -> Received:
    """A hello of this peer, as the learner receives it."""
    peer.send(HELLO)
    received = learner.recv(WAIT_S)
    assert isinstance(received, Received)
    assert received.message == HELLO
    return received


def test_garbage_is_answered_and_a_valid_peer_still_works(learner: LearnerSocket, peer: Peer):
    for garbage, code in (
        ([b""], ErrorCode.MALFORMED),
        ([b"\xc1\xc1", b"x" * 1000], ErrorCode.MALFORMED),
        ([os.urandom(500) for _ in range(20)], ErrorCode.MALFORMED),
        ([b"\x80"] * 5000, ErrorCode.TOO_LARGE),
        ([b"x" * 600_000, b"y" * 600_000], ErrorCode.TOO_LARGE),
        ([pack({"type": "new_thing"})], ErrorCode.UNKNOWN_TYPE),
        (frames_of(Ack(ticket_ids=())), ErrorCode.WRONG_DIRECTION),
    ):
        answer = answer_to(peer, learner, garbage)
        assert isinstance(answer, Error)
        assert answer.code is code
        assert answer.reason
    heard(peer, learner)


def test_an_error_is_not_answered_and_a_huge_frame_costs_its_connection_alone(learner: LearnerSocket, peer: Peer):
    peer.send([pack({"type": "error", "code": "from the future"})])
    bad = learner.recv(WAIT_S)
    assert isinstance(bad, BadMessage)
    assert bad.answer is None
    oversized = Peer(learner.endpoint)
    oversized.send([b"z" * (LIMITS.max_message_bytes + 1)])
    assert learner.recv(0.3) is None
    oversized.socket.close(linger=0)
    assert peer.receive(0) is None
    heard(peer, learner)


def test_a_hello_of_another_protocol_is_refused_with_a_reason(learner: LearnerSocket, peer: Peer):
    strange = pack({"type": "hello", "protocol_major": 90, "server_id": "s9", "colour": "red"})
    refusal = answer_to(peer, learner, [strange])
    assert isinstance(refusal, Refusal)
    assert refusal.code is ErrorCode.PROTOCOL_VERSION
    assert "server 's9' speaks protocol 90.0" in refusal.reason
    broken = answer_to(peer, learner, [pack({"type": "hello", "protocol_major": PROTOCOL_MAJOR})])
    assert isinstance(broken, Error)


def test_check_hello():
    def check(hello: Hello, live: dict[str, str] | None = None) -> Refusal | None:
        return check_hello(
            hello,
            model_fingerprint=HELLO.model_fingerprint,
            processor_fingerprint=HELLO.processor_fingerprint,
            base_fingerprint="b1",
            scoring={"reward.functions": "r1", "rw.py": "s1", "learner.py": "l1"},
            live_server_ids=live or {},
        )

    scoring = (("reward.functions", "r1"), ("rw.py", "s1"), ("server.py", "v1"))
    fitting = HELLO.model_copy(update={"base_fingerprint": "b1", "scoring": scoring})
    edited, other_weights = (*scoring[:1], ("rw.py", "s2")), (("reward.functions", "r2"), *scoring[1:])
    versions = (f"1.{PROTOCOL_MINOR}", f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}")
    assert check(fitting) is None
    assert check(fitting.model_copy(update={"protocol_minor": 7})) is None
    reconnected = {"server-0": HELLO.session, "server-1": "another"}
    assert check(fitting, reconnected) is None
    for changes, live, code, values, fix in (
        ({"protocol_major": 1}, {}, ErrorCode.PROTOCOL_VERSION, versions, "server"),
        ({"model_fingerprint": "mb"}, {}, ErrorCode.MODEL_MISMATCH, ("mb", HELLO.model_fingerprint), "model path"),
        ({"base_fingerprint": "b2"}, {}, ErrorCode.MODEL_MISMATCH, ("b2", "b1"), "*.safetensors"),
        ({"base_fingerprint": ""}, {}, ErrorCode.MODEL_MISMATCH, ("unknown", "b1"), "*.safetensors"),
        ({"quantization": "fp8"}, {}, ErrorCode.MODEL_MISMATCH, ("'fp8'", "expects ''"), "same rollout.quantization"),
        ({"processor_fingerprint": "pb"}, {}, ErrorCode.PROCESSOR_MISMATCH, ("pb", content.PROCESSOR), "model files"),
        ({"scoring": edited}, {}, ErrorCode.REWARD_MISMATCH, (": rw.py is not what the run has",), "--accept-changes"),
        ({"scoring": other_weights}, {}, ErrorCode.REWARD_MISMATCH, (": reward.functions is not",), "Put back what"),
        ({}, {"server-0": "untold"}, ErrorCode.DUPLICATE_SERVER, (HELLO.session, "pid 1"), "an id of its own"),
    ):
        refusal = check(fitting.model_copy(update=changes), live)
        assert refusal is not None
        assert refusal.code == code
        assert fix in refusal.fix
        assert all(value in refusal.reason for value in ("server-0", *values))
        assert "untold" not in refusal.reason


def test_sending_to_a_peer_that_has_gone_is_reported(learner: LearnerSocket, peer: Peer):
    assert learner.send(b"nobody", LearnerHeartbeat(version=0)) is Delivery.UNREACHABLE
    received = heard(peer, learner)
    peer.socket.close()
    wait_until(lambda: learner.send(received.identity, WELCOME) is Delivery.UNREACHABLE, "its end", timeout_s=WAIT_S)


def test_a_peer_that_does_not_read_fills_its_queue_and_blocks_nobody():
    learner = LearnerSocket("tcp://127.0.0.1:0", ControlFromServer, setting="port", queues=Queues(5, 5), linger_s=0)
    slow = Peer(learner.endpoint)
    received = heard(slow, learner)
    bulky = Chunk(version=1, offset=0, data=memoryview(bytes(1_000_000)))
    outcomes: list[Delivery] = []
    deadline = time.monotonic() + WAIT_S
    while outcomes[-20:] != 20 * [Delivery.QUEUE_FULL]:  # the system's buffers take some more after the first
        assert time.monotonic() < deadline, outcomes
        outcomes.append(learner.send(received.identity, bulky))
        time.sleep(0.005)
    assert 5 <= outcomes.count(Delivery.SENT) < 100
    slow.socket.close(linger=0)
    learner.close()


def test_a_server_without_learner_times_out_and_says_what_it_waited_for():
    async def lonely() -> None:
        sock = ServerSocket(f"tcp://127.0.0.1:{free_port()}", ControlFromLearner, linger_s=0)
        assert await sock.recv(0.02) is None
        with pytest.raises(SendTimeout, match=r"waited 0\.05 s to send `hello` to the learner at tcp://"):
            await sock.send(HELLO, 0.05)
        sock.close()

    asyncio.run(lonely())


def test_cancelled_receives_lose_no_message(learner: LearnerSocket):
    async def scenario() -> list[int]:
        sock = ServerSocket(learner.endpoint, ControlFromLearner)
        await sock.send(HELLO, WAIT_S)
        received = await asyncio.to_thread(learner.recv, WAIT_S)
        assert isinstance(received, Received)
        steps = []
        for step in range(50):
            learner.send(received.identity, LearnerHeartbeat(version=step))
            impatient = asyncio.create_task(sock.recv(WAIT_S))
            await asyncio.sleep(0.0005 * (step % 4))
            impatient.cancel()
            result = (await asyncio.gather(impatient, return_exceptions=True))[0]
            if isinstance(result, LearnerHeartbeat):
                steps.append(result.version)
        while isinstance(message := await sock.recv(0.2), LearnerHeartbeat):
            steps.append(message.version)
        sock.close()
        return steps

    assert asyncio.run(scenario()) == list(range(50))


def test_only_a_free_tcp_endpoint_can_be_bound(learner: LearnerSocket):
    sock = LearnerSocket("tcp://localhost:0", ControlFromServer, setting="port")
    assert sock.endpoint.startswith("tcp://127.0.0.1:")
    sock.close()
    port = learner.endpoint.rpartition(":")[2]
    taken = rf"port {port} on 127.0.0.1 is in use by another process\. .* set network\.weights_port"
    with pytest.raises(PortInUseError, match=taken):
        LearnerSocket(learner.endpoint, ControlFromServer, setting="network.weights_port")
    for endpoint in ("127.0.0.1:80", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "ipc:///tmp/x"):
        with pytest.raises(BindError, match="is not an endpoint"):
            LearnerSocket(endpoint, ControlFromServer, setting="port")


def test_host_id_is_equal_across_processes_and_differs_by_file_system(tmp_path: Path):
    code = "from protocol.endpoints import host_id; print(host_id())"
    command = [sys.executable, "-c", code]
    other = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.strip() == host_id()
    assert host_id() != host_id(Path("/proc"))
    missing = tmp_path / "missing"
    assert host_id(missing) != host_id(missing), "no shared memory: equal to nobody's"


# --- budgets of peers -------------------------------------------------------------------------------


def test_a_budget_recovers():
    now = [0.0]
    budget = PeerBudget(PeerLimits(bad_messages=3, messages=10, interval_s=10, mute_s=60), clock=lambda: now[0])
    assert [budget.charge(b"a") is not None for _ in range(3)] == [False, False, True]
    assert budget.is_muted(b"a")
    assert not budget.is_muted(b"b")
    now[0] = 59
    assert budget.is_muted(b"a")
    now[0] = 61
    assert not budget.is_muted(b"a")
    assert [budget.charge(b"a") is not None for _ in range(2)] == [False, False]
    now[0] = 72
    assert budget.charge(b"a") is None, "a new interval"
    assert [budget.count(b"b") is not None for _ in range(11)] == [False] * 10 + [True]


def test_accounts_are_bounded():
    budget = PeerBudget()
    for number in range(3 * MAX_ACCOUNTS):
        budget.count(number.to_bytes(4, "big"))
    assert len(budget._accounts) == MAX_ACCOUNTS


def test_sockets_follow_each_other_as_fast_as_they_like() -> None:
    """ZeroMQ gives a monitor's address back late: a server that dialled again ended with `Address already in use`."""
    for _ in range(200):
        sock = zmq.Context.instance().socket(zmq.DEALER)
        events = HandshakeEvents(sock)
        events.close()
        sock.close()
        del events  # the next one takes its place in memory
