"""One peer sends garbage, or never reads: it is muted or lost, and a good server at work does not notice."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from asyncrl.telemetry.logs import RepeatLimitingHandler
from learner.network.sockets import open_sockets
from learner.tickets.ticket_deadline import TicketDeadline
from protocol.codec import encode
from protocol.errors import ErrorCode
from protocol.handshake import PeerLimits
from protocol.messages import Ack, Goodbye, TicketFailed, Tickets, Welcome
from tests.rigs.fuzz import content
from tests.rigs.fuzz.mutations import frames_of, pack
from tests.rigs.fuzz.peers import WAIT_S, Peer, good_server
from tests.rigs.fuzz.rig import PER_STEP, LearnerRig, small_config

GARBAGE = [b"\xc1 garbage"]
Start = Callable[[LearnerRig], Future[dict[str, Any]]]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[LearnerRig]:
    opened = LearnerRig(small_config(), tmp_path)
    opened.start()
    yield opened
    opened.close()


@pytest.fixture
def peer(rig: LearnerRig) -> Iterator[Peer]:
    opened = Peer(rig.endpoints[0])
    yield opened
    opened.send(Goodbye(reason="enough"))
    opened.socket.close()


@pytest.fixture
def another(rig: LearnerRig) -> Iterator[Start]:
    """Starts a good server, which ends when the learner does."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        yield lambda rig: processes.submit(good_server, *rig.endpoints)
        rig.network.stop("done")


def wait_until(rig: LearnerRig, satisfied: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not satisfied():
        servers = rig.network.servers
        assert time.monotonic() < deadline, f"errors {servers.errors}, servers {list(servers.connected)}"
        rig.turn()


def check_good_server(rig: LearnerRig, server: Future[dict[str, Any]], groups: int) -> None:
    """It must get so many more groups acknowledged, without errors or long waits."""
    before = len(rig.taken)
    wait_until(rig, lambda: len(rig.taken) >= before + groups)
    rig.network.stop("done")
    report = server.result(timeout=WAIT_S)
    assert report["errors"] == []
    assert not rig.problems()
    assert report["ack"]["p99_ms"] < 1000
    assert report["pulse"]["max_ms"] < 2000, "heartbeats and work went on"


def test_a_peer_that_sends_garbage_is_muted_and_its_tickets_go_to_another(rig: LearnerRig, peer: Peer, another: Start):
    peer.send(content.hello("peer", max_groups=1000))
    held = {ticket.ticket_id for ticket in peer.hear(Tickets).tickets}
    assert len(held) == 2 * PER_STEP, "all of them"
    server = another(rig)
    for _ in range(PeerLimits().bad_messages):
        peer.send(GARBAGE)
    peer.hear_error(ErrorCode.MUTED)
    wait_until(rig, lambda: "peer" not in rig.network.servers.connected)
    counted = rig.network.servers.errors["malformed"]
    for _ in range(5000):
        peer.send(GARBAGE)
    peer.send(content.hello("peer"))
    check_good_server(rig, server, 200)
    assert held <= set(rig.taken), "made by the good server"
    assert rig.network.servers.errors["muted"] == 1
    assert rig.network.servers.errors["malformed"] == counted, "dropped without being decoded"
    assert rig.network.control.dropped > 100


def test_refused_groups_use_up_the_budget(rig: LearnerRig, peer: Peer):
    peer.send(content.hello("peer", max_groups=1000))
    peer.hear(Tickets)  # groups of tickets that do not exist yet would be answered otherwise
    for ticket_id in range(20):
        wrong = content.group(ticket_id, 0, "peer")
        wrong.token_ids.fill(content.BANNED)
        peer.send(wrong)
    peer.hear_error(ErrorCode.REFUSED_GROUP)
    peer.hear_error(ErrorCode.MUTED)


def test_an_unwelcome_stranger_cannot_fill_the_disk_with_log(rig: LearnerRig, peer: Peer):
    said = io.StringIO()
    handler = RepeatLimitingHandler(said)
    logging.getLogger().addHandler(handler)
    refused = content.hello("stranger").model_copy(update={"model_fingerprint": "another"})
    nonsense = TicketFailed(ticket_id=10**9, error_kind="why", error_message="x" * 2000)
    try:
        for _ in range(3000):
            peer.send(refused)
        peer.hear_error(ErrorCode.MUTED)
        for number in range(30):  # each connection has a budget of its own
            other = Peer(rig.endpoints[0])
            other.send(content.hello(f"stranger-{number}"))
            other.hear(Welcome)
            for _ in range(100):
                other.send(nonsense)
            other.hear_error(ErrorCode.MUTED)
            other.socket.close()
    finally:
        handler.close()
        logging.getLogger().removeHandler(handler)
    # Counted in the turn after the one that says it.
    wait_until(rig, lambda: rig.network.servers.errors["muted"] == 31)
    assert len(said.getvalue()) < 200_000
    assert "times in" in said.getvalue(), "what is not said is counted"


def test_a_server_that_never_reads_its_tickets_loses_them(rig: LearnerRig, peer: Peer, another: Start):
    """It says hello and goes on sending heartbeats: it seems alive."""
    peer.send(content.hello("peer", max_groups=1000))
    wait_until(rig, lambda: bool(rig.ledger.out.held_by("peer")))
    server = another(rig)

    def has_lost_them() -> bool:
        peer.send(content.heartbeat(running=0))
        time.sleep(0.05)
        return "peer" not in rig.network.servers.connected and bool(rig.taken)

    wait_until(rig, has_lost_them)
    check_good_server(rig, server, 100)


def test_a_wedged_server_does_not_stop_the_run(rig: LearnerRig, peer: Peer, another: Start):
    """It sends heartbeats, says that it works, and never finishes: another one gets its tickets, too."""
    out = rig.ledger.out
    out.deadline = TicketDeadline(least_s=0.5, unmeasured_s=1.0)
    peer.send(content.hello("peer", max_groups=1000))
    wait_until(rig, lambda: bool(out.held_by("peer")))
    held = out.held_by("peer")
    server = another(rig)

    def steps_are_made() -> bool:
        peer.send(content.heartbeat(running=1))
        return len(rig.taken) >= 100

    wait_until(rig, steps_are_made)
    assert (out.reissued, out.held_by("peer"), out.duplicates) == (held, held, 0), "it gets no more"
    peer.send(content.group(0, 0, "peer"))
    assert peer.hear(Ack).ticket_ids == (0,), "late, and needed no more"
    assert out.duplicates == 1
    check_good_server(rig, server, 100)


def test_the_ticket_of_a_group_that_cannot_be_decoded_goes_back(rig: LearnerRig, peer: Peer):
    peer.send(content.hello("peer", max_groups=1))
    (ticket,) = peer.hear(Tickets).tickets
    group = frames_of(content.group(ticket.ticket_id, 0, "peer"))
    peer.send([*group[:-1], bytes(group[-1])[:-1]])
    error = peer.hear_error(ErrorCode.MALFORMED)
    assert error.ticket_id == ticket.ticket_id, "the server forgets it, instead of sending it for ever"
    assert peer.hear(Tickets).tickets == (ticket,), "there is no other server"


def test_one_connection_is_one_server_and_may_send_unknown_types(rig: LearnerRig, peer: Peer):
    for _ in range(200):
        peer.send([pack({"type": "from_the_future"})])
    peer.send(content.hello("first"))
    peer.hear(Welcome)
    peer.send(content.hello("second"))
    assert "is server 'first' already" in peer.hear_error(ErrorCode.DUPLICATE_SERVER).reason
    assert list(rig.network.servers.connected) == ["first"]


def test_the_largest_group_that_a_ticket_allows_gets_in():
    config = small_config()
    size, length = config.batch.group_size, config.data.max_response_length
    right = content.group(1, 0, "server", [length] * size)
    update = {"prompt_ids": np.zeros(config.data.max_prompt_length, np.int32)}
    arrays = sum(memoryview(frame).nbytes for frame in encode(right.model_copy(update=update))[1:])
    with zmq.Context() as context:
        ports = open_sockets(config.network, config.network_settings.largest_group_bytes, context)
        inbound = ports.control._inbound
        assert inbound.max_header_bytes + arrays <= inbound.max_message_bytes
        assert inbound.max_message_bytes < ports.control.limits.max_message_bytes / 4
        assert ports.weights._inbound.max_message_bytes == inbound.max_header_bytes
        ports.close()
