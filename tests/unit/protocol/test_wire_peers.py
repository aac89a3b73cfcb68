"""One peer sends garbage, floods, or never reads: it is muted, and a good server at work does not notice."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest
import zmq

from asyncrl.errors import BadStateError
from protocol.codec import Limits, decode, encode
from protocol.errors import ErrorCode
from protocol.messages import (
    ChunkRequest,
    ControlFromLearner,
    Error,
    Goodbye,
    Message,
    TicketFailed,
    Tickets,
    Welcome,
    Wire,
)
from protocol.peers import MAX_ACCOUNTS, PeerBudget, PeerLimits
from protocol.socket_options import CHUNK_QUEUES
from tests.rigs.fuzz import content
from tests.rigs.fuzz.rig import PER_STEP, LearnerRig, small_config

ROOT = Path(__file__).parents[3]
WAIT_S = 20.0
LIMITS = Limits()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[LearnerRig]:
    opened = LearnerRig(small_config(), tmp_path)
    opened.start()
    yield opened
    opened.close()


class Peer:
    """A DEALER without manners."""

    def __init__(self, rig: LearnerRig, name: str = "peer", *, receive: int = 1000):
        self.name = name
        self.sockets = []
        for endpoint in (rig.config.control_endpoint, rig.config.weights_endpoint):
            sock = zmq.Context.instance().socket(zmq.DEALER)
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.SNDTIMEO, int(WAIT_S * 1000))
            sock.setsockopt(zmq.RCVHWM, receive)
            sock.connect(endpoint)
            self.sockets.append(sock)
        self.control, self.weights = self.sockets

    def send(self, message: Wire) -> None:
        self.control.send_multipart(encode(message))

    def hear(self, kind: type[Wire]) -> Message:
        """The next message of that kind."""
        deadline = time.monotonic() + WAIT_S
        while self.control.poll(max(0, round(1000 * (deadline - time.monotonic())))):
            message = decode(self.control.recv_multipart(), ControlFromLearner, LIMITS)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} within {WAIT_S} s")

    def hear_error(self, code: ErrorCode) -> Error:
        while True:
            error = self.hear(Error)
            assert isinstance(error, Error)
            if error.code is code:
                return error

    def close(self) -> None:
        self.send(Goodbye(reason="enough"))
        for sock in self.sockets:
            sock.close(linger=500)


@pytest.fixture
def peer(rig: LearnerRig) -> Iterator[Peer]:
    opened = Peer(rig)
    yield opened
    opened.close()


def wait_until(rig: LearnerRig, satisfied: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not satisfied():
        assert time.monotonic() < deadline, f"errors {rig.exchange.errors}, servers {list(rig.exchange.servers)}"
        rig.turn()


def good_server(rig: LearnerRig) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.rigs.fuzz.good_server",
        rig.config.control_endpoint,
        rig.config.weights_endpoint,
    ]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def verdict_of_good_server(rig: LearnerRig, server: subprocess.Popen[str], groups: int) -> dict:
    """It must get so many more groups acknowledged; then the learner says goodbye and it reports."""
    before = len(rig.taken)
    wait_until(rig, lambda: len(rig.taken) >= before + groups)
    rig.exchange.stop("done")
    out, _ = server.communicate(timeout=WAIT_S)
    report = json.loads(out)
    assert report["errors"] == []
    assert not rig.problems()
    return report


def test_a_peer_that_sends_garbage_is_muted_and_its_tickets_go_to_another(rig: LearnerRig, peer: Peer):
    peer.send(content.hello("peer", max_groups=1000))
    tickets = peer.hear(Tickets)
    assert isinstance(tickets, Tickets)
    held = {ticket.ticket_id for ticket in tickets.tickets}
    assert len(held) == 2 * PER_STEP, "all of them"
    server = good_server(rig)
    for _ in range(PeerLimits().bad_messages):
        peer.control.send(b"\xc1 garbage")
    reason = peer.hear_error(ErrorCode.MUTED).reason
    assert "16 unusable messages" in reason
    assert "ignored for 60 s" in reason
    wait_until(rig, lambda: "peer" not in rig.exchange.servers)
    counted = rig.exchange.errors["malformed"]
    for _ in range(5000):
        peer.control.send(b"\xc1 garbage")
    peer.send(content.hello("peer"))
    report = verdict_of_good_server(rig, server, 200)
    assert held <= set(rig.taken), "made by the good server"
    assert rig.exchange.errors["muted"] == 1
    assert rig.exchange.errors["malformed"] == counted, "dropped without being decoded"
    assert rig.exchange.control.counters.dropped > 100
    assert report["ack"]["p99_ms"] < 1000
    assert report["pulse"]["max_ms"] < 2000, "heartbeats and work went on"


def test_a_peer_that_floods_with_good_messages_is_muted_too(rig: LearnerRig, peer: Peer):
    server = good_server(rig)
    peer.send(content.hello("peer", max_groups=1))
    assert isinstance(peer.hear(Welcome), Welcome)
    beat = encode(content.heartbeat())
    for _ in range(PeerLimits().messages + 5000):
        peer.control.send_multipart(beat)
    assert "messages in" in peer.hear_error(ErrorCode.MUTED).reason
    report = verdict_of_good_server(rig, server, 200)
    assert report["ack"]["p99_ms"] < 1000
    assert report["pulse"]["max_ms"] < 2000


def test_a_peer_that_asks_for_weights_and_never_reads_costs_a_bounded_queue(rig: LearnerRig):
    stalled = Peer(rig, receive=1)
    server = good_server(rig)
    wait_until(rig, lambda: len(rig.taken) > 0)
    before = rig.rss_mib()
    for _ in range(3000):
        request = ChunkRequest(version=rig.version, publication=rig.publication.id, offset=0, nbytes=4 << 20)
        stalled.weights.send_multipart(encode(request))
    wait_until(rig, lambda: rig.exchange.weights.counters.undelivered > 0)
    grown = rig.rss_mib() - before
    report = verdict_of_good_server(rig, server, 200)
    stalled.close()
    assert grown < 1.5 * 4 * CHUNK_QUEUES.send + 64, f"{grown:.0f} MiB for chunks that nobody reads"
    assert report["chunk"]["count"] > 0
    assert report["chunk"]["max_ms"] < 3000
    assert report["ack"]["p99_ms"] < 1000


def test_a_server_that_never_reads_its_tickets_loses_them(rig: LearnerRig, peer: Peer):
    """It says hello and goes on sending heartbeats: it seems alive."""
    peer.send(content.hello("peer", max_groups=1000))
    deadline = time.monotonic() + WAIT_S
    server = None
    while "peer" in rig.exchange.servers or not rig.taken:
        assert time.monotonic() < deadline
        peer.send(content.heartbeat(running=0))
        rig.turn()
        if server is None and rig.ledger.out.held_by("peer"):
            server = good_server(rig)
        time.sleep(0.05)
    assert server is not None
    verdict_of_good_server(rig, server, 100)


def test_one_bad_server_ends_no_run(rig: LearnerRig, peer: Peer):
    """It fails every ticket that it gets, and claims to have failed at those of others."""
    server = good_server(rig)
    wait_until(rig, lambda: len(rig.taken) > 0)
    peer.send(content.hello("peer", max_groups=1000))
    deadline = time.monotonic() + 3
    failed: set[int] = set()
    while time.monotonic() < deadline:
        rig.turn()
        while peer.control.poll(0):
            message = decode(peer.control.recv_multipart(), ControlFromLearner, LIMITS)
            if isinstance(message, Tickets):
                ids = {ticket.ticket_id for ticket in message.tickets}
                assert not ids & failed, "a ticket came back to the server that failed at it"
                failed |= ids
                for ticket_id in range(max(ids) + PER_STEP):
                    peer.send(TicketFailed(ticket_id=ticket_id, error_kind="bad", error_message="no"))
    assert failed
    verdict_of_good_server(rig, server, 200)


def test_a_ticket_at_which_the_only_server_fails_ends_the_run(rig: LearnerRig, peer: Peer):
    peer.send(content.hello("peer", max_groups=1))
    for _ in range(3):
        tickets = peer.hear(Tickets)
        assert isinstance(tickets, Tickets)
        peer.send(TicketFailed(ticket_id=tickets.tickets[0].ticket_id, error_kind="bad", error_message="no"))
    with pytest.raises(BadStateError, match="failed 3 times: bad: no"):
        wait_until(rig, lambda: False)


def test_refused_groups_use_up_the_budget(rig: LearnerRig, peer: Peer):
    peer.send(content.hello("peer", max_groups=1000))
    peer.hear(Tickets)  # groups of tickets that do not exist yet would be answered otherwise
    server = good_server(rig)
    for ticket_id in range(20):
        wrong = content.group(ticket_id, 0, "peer")
        wrong.token_ids.fill(content.BANNED)
        peer.send(wrong)
    peer.hear_error(ErrorCode.REFUSED_GROUP)
    peer.hear_error(ErrorCode.MUTED)
    verdict_of_good_server(rig, server, 100)


def test_one_connection_is_one_server(rig: LearnerRig, peer: Peer):
    peer.send(content.hello("first"))
    assert isinstance(peer.hear(Welcome), Welcome)
    peer.send(content.hello("second"))
    assert "is server 'first' already" in peer.hear_error(ErrorCode.DUPLICATE_SERVER).reason
    assert list(rig.exchange.servers) == ["first"]


def test_a_newer_peer_may_send_types_that_we_do_not_know(rig: LearnerRig, peer: Peer):
    packed = msgpack.packb({"type": "from_the_future"})
    assert packed is not None
    for _ in range(200):
        peer.control.send(packed)
    peer.send(content.hello("peer"))
    assert isinstance(peer.hear(Welcome), Welcome)


def test_words_of_peers_become_only_so_many_labels(rig: LearnerRig, peer: Peer):
    peer.send(content.hello("peer", max_groups=1))
    for number in range(300):
        failed = TicketFailed(ticket_id=2**62, error_kind=f"kind {number}\n", error_message="forged\nline")
        assert "\n" not in failed.error_kind + failed.error_message
        peer.send(failed)
    wait_until(rig, lambda: rig.exchange.errors["other"] > 200)
    assert len(rig.exchange.errors) < 70


# --- the budget itself ----------------------------------------------------------------------------


def test_a_budget_recovers_and_repetition_costs_more():
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
    for _ in range(2):
        muted = budget.charge(b"a")
    assert muted is not None
    assert "for 120 s" in muted.reason
    assert [budget.count(b"b") is not None for _ in range(11)] == [False] * 10 + [True]


def test_accounts_are_bounded():
    budget = PeerBudget()
    for number in range(3 * MAX_ACCOUNTS):
        budget.count(number.to_bytes(4, "big"))
    assert len(budget._accounts) == MAX_ACCOUNTS
