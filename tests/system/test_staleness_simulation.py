"""Staleness bounds hold with heavy-tailed lengths, in virtual time; and tickets are shared fairly among servers."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

import learner.tickets.ledger
from asyncrl.config.service_sections import OnStale
from asyncrl.journal.writer import TicketSlot
from benchmarks.staleness.simulation import simulate
from benchmarks.staleness.sockets import run_over_sockets
from benchmarks.staleness.workload import Workload
from learner.groups.ticket import PreparedTicket
from learner.network.ticket_sender import Room, share_tickets
from learner.tickets.ledger import TicketLedger

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


def shared(
    count: int, held: dict[str, int], most: int = 100, never: tuple[int, str] = (-1, "")
) -> dict[str, list[int]]:
    rooms = {name: Room(number, most) for name, number in held.items()}
    shares = share_tickets(tickets(count), rooms, lambda ticket_id, server_id: (ticket_id, server_id) != never)
    return {server_id: [item.ticket.ticket_id for item in items] for server_id, items in shares.items()}


def test_tickets_go_to_the_least_loaded_server() -> None:
    assert shared(5, {"busy": 3, "idle": 0}) == {"idle": [0, 1, 2, 4], "busy": [3]}
    assert shared(1, {"busy": 3, "idle": 0}) == {"idle": [0]}
    assert shared(3, {}) == {}


def test_no_server_gets_more_than_it_is_willing_to_hold() -> None:
    assert shared(9, {"a": 0, "b": 2}, most=3) == {"a": [0, 1, 2], "b": [3]}
    assert shared(9, {"a": 5}, most=3) == {}


def test_a_ticket_goes_to_a_server_that_may_try_it() -> None:
    assert shared(2, {"a": 0, "b": 0}, never=(0, "a")) == {"a": [1], "b": [0]}
