"""One peer sends garbage, floods, or never reads: it is muted, and a good server at work does not notice."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgpack
import numpy as np
import pytest
import zmq

from asyncrl.errors import BadStateError
from learner.network.ports import open_ports
from protocol.codec import Limits, decode, encode
from protocol.errors import ErrorCode
from protocol.messages import ControlFromLearner, Error, Goodbye, TicketFailed, Tickets, Welcome, Wire
from protocol.peers import PeerLimits
from tests.rigs.fuzz import content
from tests.rigs.fuzz.rig import PER_STEP, LearnerRig, small_config
from tests.rigs.fuzz_wire import start

WAIT_S = 20.0
Kind = TypeVar("Kind", bound=Wire)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[LearnerRig]:
    opened = LearnerRig(small_config(), tmp_path)
    opened.start()
    yield opened
    opened.close()


class Peer:
    """A plain DEALER on the control endpoint, without any rules."""

    def __init__(self, rig: LearnerRig):
        self.control = zmq.Context.instance().socket(zmq.DEALER)
        self.control.setsockopt(zmq.LINGER, 500)
        self.control.setsockopt(zmq.SNDTIMEO, int(WAIT_S * 1000))
        self.control.connect(rig.config.control_endpoint)

    def send(self, message: Wire) -> None:
        self.control.send_multipart(encode(message))

    def hear(self, kind: type[Kind]) -> Kind:
        """The next message of that kind."""
        deadline = time.monotonic() + WAIT_S
        while self.control.poll(max(0, round(1000 * (deadline - time.monotonic())))):
            message = decode(self.control.recv_multipart(), ControlFromLearner, Limits())
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} within {WAIT_S} s")

    def hear_error(self, code: ErrorCode) -> Error:
        while (error := self.hear(Error)).code is not code:
            pass
        return error

    def fail(self, ticket_id: int) -> None:
        self.send(TicketFailed(ticket_id=ticket_id, error_kind="bad", error_message="no"))


@pytest.fixture
def peer(rig: LearnerRig) -> Iterator[Peer]:
    opened = Peer(rig)
    yield opened
    opened.send(Goodbye(reason="enough"))
    opened.control.close()


def wait_until(rig: LearnerRig, satisfied: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not satisfied():
        servers = rig.network.servers
        assert time.monotonic() < deadline, f"errors {servers.errors}, servers {list(servers.connected)}"
        rig.turn()


def good_server(rig: LearnerRig) -> subprocess.Popen[str]:
    return start("good_server", rig.config.control_endpoint, rig.config.weights_endpoint)


def check_good_server(rig: LearnerRig, server: subprocess.Popen[str], groups: int) -> None:
    """It must get so many more groups acknowledged, without errors or long waits."""
    before = len(rig.taken)
    wait_until(rig, lambda: len(rig.taken) >= before + groups)
    rig.network.stop("done")
    out, _ = server.communicate(timeout=WAIT_S)
    report = json.loads(out)
    assert report["errors"] == []
    assert not rig.problems()
    assert report["ack"]["p99_ms"] < 1000
    assert report["pulse"]["max_ms"] < 2000, "heartbeats and work went on"


def test_a_peer_that_sends_garbage_is_muted_and_its_tickets_go_to_another(rig: LearnerRig, peer: Peer):
    peer.send(content.hello("peer", max_groups=1000))
    held = {ticket.ticket_id for ticket in peer.hear(Tickets).tickets}
    assert len(held) == 2 * PER_STEP, "all of them"
    server = good_server(rig)
    for _ in range(PeerLimits().bad_messages):
        peer.control.send(b"\xc1 garbage")
    peer.hear_error(ErrorCode.MUTED)
    wait_until(rig, lambda: "peer" not in rig.network.servers.connected)
    counted = rig.network.servers.errors["malformed"]
    for _ in range(5000):
        peer.control.send(b"\xc1 garbage")
    peer.send(content.hello("peer"))
    check_good_server(rig, server, 200)
    assert held <= set(rig.taken), "made by the good server"
    assert rig.network.servers.errors["muted"] == 1
    assert rig.network.servers.errors["malformed"] == counted, "dropped without being decoded"
    assert rig.network.control.dropped > 100


def test_a_peer_that_floods_with_good_messages_is_muted_too(rig: LearnerRig, peer: Peer):
    server = good_server(rig)
    peer.send(content.hello("peer", max_groups=1))
    peer.hear(Welcome)
    beat = encode(content.heartbeat())
    for _ in range(PeerLimits().messages + 5000):
        peer.control.send_multipart(beat)
    assert "messages in" in peer.hear_error(ErrorCode.MUTED).reason
    check_good_server(rig, server, 100)


def test_refused_groups_use_up_the_budget(rig: LearnerRig, peer: Peer):
    peer.send(content.hello("peer", max_groups=1000))
    peer.hear(Tickets)  # groups of tickets that do not exist yet would be answered otherwise
    for ticket_id in range(20):
        wrong = content.group(ticket_id, 0, "peer")
        wrong.token_ids.fill(content.BANNED)
        peer.send(wrong)
    peer.hear_error(ErrorCode.REFUSED_GROUP)
    peer.hear_error(ErrorCode.MUTED)


def test_a_server_that_never_reads_its_tickets_loses_them(rig: LearnerRig, peer: Peer):
    """It says hello and goes on sending heartbeats: it seems alive."""
    peer.send(content.hello("peer", max_groups=1000))
    deadline = time.monotonic() + WAIT_S
    server = None
    while "peer" in rig.network.servers.connected or not rig.taken:
        assert time.monotonic() < deadline
        peer.send(content.heartbeat(running=0))
        rig.turn()
        if server is None and rig.ledger.out.held_by("peer"):
            server = good_server(rig)
        time.sleep(0.05)
    assert server is not None
    check_good_server(rig, server, 100)


def test_a_ticket_at_which_the_only_server_fails_ends_the_run(rig: LearnerRig, peer: Peer):
    peer.send(content.hello("peer", max_groups=1))
    for _ in range(3):
        peer.fail(peer.hear(Tickets).tickets[0].ticket_id)
    with pytest.raises(BadStateError, match="failed 3 times: bad: no"):
        wait_until(rig, lambda: False)


def test_one_connection_is_one_server(rig: LearnerRig, peer: Peer):
    peer.send(content.hello("first"))
    peer.hear(Welcome)
    peer.send(content.hello("second"))
    assert "is server 'first' already" in peer.hear_error(ErrorCode.DUPLICATE_SERVER).reason
    assert list(rig.network.servers.connected) == ["first"]


def test_a_newer_peer_may_send_unknown_types(rig: LearnerRig, peer: Peer):
    for _ in range(200):
        peer.control.send(msgpack.packb({"type": "from_the_future"}))
    peer.send(content.hello("peer"))
    peer.hear(Welcome)


def test_the_largest_group_that_a_ticket_allows_gets_in():
    config = small_config()
    size, length = config.batch.group_size, config.data.max_response_length
    right = content.group(1, 0, "server")
    columns = {name: np.zeros(size * length, np.int32) for name in ("token_ids", "versions", "kv_versions")}
    group = right.model_copy(
        update={
            **columns,
            "prompt_ids": np.zeros(config.data.max_prompt_length, np.int32),
            "loss_mask": np.ones(size * length, np.uint8),
            "logprobs": np.zeros(size * length, np.float32),
            "lengths": np.full(size, length, np.int32),
            "trajectories": right.trajectories[:1] * size,
        }
    )
    arrays = sum(memoryview(frame).nbytes for frame in encode(group)[1:])
    with zmq.Context() as context:
        ports = open_ports(config, context)
        inbound = ports.control._inbound
        assert inbound.max_header_bytes + arrays <= inbound.max_message_bytes
        assert inbound.max_message_bytes < ports.control.limits.max_message_bytes / 4
        assert ports.weights._inbound.max_message_bytes == inbound.max_header_bytes
        ports.close()
