"""Staleness bounds hold with heavy-tailed lengths, in virtual time; and tickets are shared fairly among servers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest

import learner.tickets.ledger
from asyncrl.config.service_sections import OnStale
from asyncrl.journal.writer import TicketSlot
from benchmarks.staleness.simulation import simulate
from benchmarks.staleness.sockets import run_over_sockets
from benchmarks.staleness.workload import Workload
from learner.network.ticket_sender import TicketSender
from learner.tickets.hand_out import ExpectedLengths, Room, ServerSpeeds, share_tickets
from learner.tickets.ledger import TicketLedger
from learner.tickets.ticket import PreparedTicket
from protocol.codec import Limits
from tests.rigs.journal_groups import throwaway_journal

MODES: tuple[OnStale, ...] = get_args(OnStale)
SHORT = Workload(servers=4, bound=2, steps=14, prompts_per_step=16, sequences=64)


@pytest.mark.parametrize("on_stale", MODES)
@pytest.mark.parametrize("bound", [0, 2, None])
def test_no_consumed_token_is_older_than_its_bound(bound: int | None, on_stale: OnStale) -> None:
    seen = simulate(replace(SHORT, bound=bound, on_stale=on_stale))
    assert not seen.problems
    if bound is not None:
        assert seen.oldest == bound, "the bound is put to use"
    assert seen.staleness.total() == sum(seen.lengths)
    mean, error = seen.true_bias
    if on_stale == "wait" or bound == 0:
        assert (seen.dropped, seen.masked_tokens, seen.bias) == (0, 0, 0)
        assert abs(mean) < 3 * error, "trained lengths are those that the engine samples"
    elif bound == 2:
        assert seen.bias < -0.05
        assert mean < -2 * error


def test_64_servers_of_one_group_each() -> None:
    seen = simulate(replace(SHORT, servers=64, sequences=256, prompts_per_step=64, steps=4))
    assert not seen.problems
    assert seen.oldest == 2


def test_a_flaw_in_the_ledger_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is not the ledger's own."""
    monkeypatch.setattr(TicketLedger, "_late", lambda ledger, earliest: [])
    monkeypatch.setattr(learner.tickets.ledger, "within_bound", lambda item, version, on_stale: item)
    seen = simulate(SHORT)
    assert any("tokens" in problem and "bound 2" in problem for problem in seen.problems)
    assert seen.oldest > 2


@pytest.mark.slow
def test_real_sockets_and_real_time_agree_with_the_simulation() -> None:
    quick = {"seconds_per_token": 0.008, "learn_s": 0.15, "weights_s": (0.0, 0.02), "latency_s": 0.002}
    workload = replace(SHORT, servers=8, bound=1, on_stale="drop", steps=8, longest=64, **quick)
    seen, simulated = run_over_sockets(workload), simulate(workload)
    assert not seen.problems
    assert seen.oldest == 1
    assert seen.mean_staleness == pytest.approx(simulated.mean_staleness, abs=0.25)
    assert seen.bias == pytest.approx(simulated.bias, abs=0.15)


def tickets(count: int) -> list[PreparedTicket]:
    return [SHORT.write_ticket(TicketSlot(i, i, 0, 2)) for i in range(count)]


def divided(free: dict[str, int], count: int = 1, bound: int = 2, **speed: float) -> dict[str, list[tuple[int, ...]]]:
    """Parts of groups of 4, by server; `free` places of 6 each."""
    size = SHORT.group_size
    rooms = {name: Room((6 - places) / size, 100, 6, speed.get(name, 1.0)) for name, places in free.items()}
    items = [SHORT.write_ticket(TicketSlot(i, i, 0, bound)) for i in range(count)]
    shares = share_tickets(items, rooms, lambda ticket_id, server_id: True, divides=True)
    return {server_id: [tuple(item.ticket.indices) for item in items] for server_id, items in shares.items()}


def test_a_group_that_no_server_has_places_for_is_divided_among_those_that_have_some() -> None:
    whole, halves = (0, 1, 2, 3), {"a": [(0, 1)], "b": [(2, 3)]}
    assert divided({"a": 2, "b": 2}) == halves
    assert divided({"a": 2, "b": 4}) == {"b": [whole]}
    assert divided({"a": 2, "b": 2}, bound=0) == {"a": [whole]}, "on-policy"
    assert divided({"a": 2, "b": 1}) == {"a": [whole]}, "there are not enough places"
    assert divided({"a": 2, "b": 2}, a=1.0, b=0.2) == {"a": [whole]}, "b is slower than waiting for a"
    assert divided({"a": 2, "b": 2, "c": 6}, count=2) == {"c": [whole], **halves}


def test_divided_groups_keep_every_promise() -> None:
    seen = simulate(replace(SHORT, sequences=24, divides=True, moves=True, slows_to=0.2))
    assert not seen.problems
    assert seen.divided > 2
    assert abs(seen.true_bias[0]) < 3 * seen.true_bias[1]


def test_prompts_that_were_long_go_out_first() -> None:
    lengths = ExpectedLengths()
    lengths.observe("simulated:2", 90.0)
    lengths.observe("simulated:1", 10.0)
    sent: list[int] = []
    connections = SimpleNamespace(lengths=lengths, speeds=ServerSpeeds(), aligned={}, send=None)
    hello = SimpleNamespace(max_groups=100, max_sequences=0)
    connections.aligned["s"] = SimpleNamespace(hello=hello, told=0)
    connections.send = lambda server_id, message: sent.extend(t.ticket_id for t in message.tickets) or True
    for bound, expected in ((1, [2, 0, 3, 1]), (0, [0, 1, 2, 3])):
        ledger = TicketLedger(throwaway_journal(), prompts_per_step=4 // (bound + 1), bound=bound, total_groups=4)
        workload = replace(SHORT, steps=1, prompts_per_step=4)
        sender = TicketSender(connections, ledger, workload.write_ticket, Limits())  # type: ignore[arg-type]
        sender.admit(0)
        sender.work()
        assert sent == expected
        sent.clear()


def shared(
    count: int, held: dict[str, int], most: int = 100, never: tuple[int, str] = (-1, ""), **speed: float
) -> dict[str, list[int]]:
    size = SHORT.group_size
    rooms = {name: Room(n, most, 8 * size if speed else 0, speed.get(name, 1.0)) for name, n in held.items()}
    shares = share_tickets(tickets(count), rooms, lambda ticket_id, server_id: (ticket_id, server_id) != never)
    return {server_id: [item.ticket.ticket_id for item in items] for server_id, items in shares.items()}


def test_tickets_go_to_the_least_loaded_of_equal_servers() -> None:
    assert shared(5, {"busy": 3, "idle": 0}) == {"idle": [0, 1, 2, 4], "busy": [3]}
    assert shared(1, {"busy": 3, "idle": 0}) == {"idle": [0]}
    assert shared(3, {}) == {}


def test_a_faster_server_gets_more_in_proportion() -> None:
    """While it has places for them, all; from then on by its speed."""
    assert set(shared(8, {"slow": 0, "fast": 0}, slow=1.0, fast=3.0)) == {"fast"}
    shares = shared(96, {"slow": 0, "fast": 0}, slow=1.0, fast=3.0)
    assert (len(shares["slow"]), len(shares["fast"])) == (24, 72)


def test_no_server_gets_more_than_it_is_willing_to_hold() -> None:
    assert shared(9, {"a": 0, "b": 2}, most=3) == {"a": [0, 1, 2], "b": [3]}
    assert shared(9, {"a": 5}, most=3) == {}


def test_a_ticket_goes_to_a_server_that_may_try_it() -> None:
    assert shared(2, {"a": 0, "b": 0}, never=(0, "a")) == {"a": [1], "b": [0]}
