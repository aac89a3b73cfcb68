"""A SampleQuery as SQL over the tables of the index."""

from __future__ import annotations

import sqlite3
from typing import Any, get_args

from asyncrl.errors import UserError
from asyncrl_plugins.viewer.samples.model import SampleQuery, SampleRow
from asyncrl_plugins.viewer.samples.sample_index import call_name
from protocol.messages.groups import CallErrorKind

PROMPT_SHOWN = 200
"""Characters of a prompt in a list."""
_NEWEST = "step DESC, ticket_id DESC, trajectory"
_ORDERS = {
    "newest": _NEWEST,
    "oldest": "step, ticket_id, trajectory DESC",
    "best": f"reward DESC, {_NEWEST}",
    "worst": "reward NULLS LAST, step, ticket_id, trajectory DESC",
    "stalest": f"staleness DESC, {_NEWEST}",
    "longest": f"length DESC, {_NEWEST}",
}


def count(db: sqlite3.Connection, query: SampleQuery) -> int:
    where, values = _conditions(query)
    return db.execute(f"SELECT COUNT(*) FROM trajectories {where}", values).fetchone()[0]


def find(db: sqlite3.Connection, query: SampleQuery, limit: int, offset: int) -> list[tuple[int, int]]:
    """Return ticket and trajectory of the rows of a page."""
    if query.order not in _ORDERS:
        raise UserError(f"samples can be in the order {', '.join(_ORDERS)}, not {query.order!r}")
    where, values = _conditions(query)
    sql = f"SELECT ticket_id, trajectory FROM trajectories {where} ORDER BY {_ORDERS[query.order]} LIMIT ? OFFSET ?"
    return db.execute(sql, (*values, limit, offset)).fetchall()


def read_group(db: sqlite3.Connection, ticket_id: int, *, has_payload: bool) -> tuple[SampleRow, ...]:
    """Read the rows of a ticket's trajectories; none if the index has no such ticket."""
    rows = db.execute(
        "SELECT trajectory, step, row_id, text, answer, status, finish_reason, reward, advantage, length, staleness, "
        "logprob_diff_max, error FROM trajectories JOIN prompts USING (prompt_id) "
        "WHERE step = (SELECT step FROM groups WHERE ticket_id = ?1) AND ticket_id = ?1 ORDER BY trajectory",
        (ticket_id,),
    )
    return tuple(
        SampleRow(
            ticket_id,
            trajectory,
            step,
            row_id,
            text if len(text) <= PROMPT_SHOWN else f"{text[:PROMPT_SHOWN]}…",
            *rest,
            has_payload=has_payload,
        )
        for trajectory, step, row_id, text, *rest in rows.fetchall()
    )


def _calls(query: SampleQuery) -> list[tuple[str, list[str]]]:
    """Conditions on the table of conversations, with their values."""
    conditions: list[tuple[str, list[str]]] = []
    if query.ends:
        conditions.append((f"ended IN ({', '.join('?' * len(query.ends))})", list(query.ends)))
    name = call_name(query.tool)
    if query.call_errors is not None:
        kinds = query.call_errors or get_args(CallErrorKind)[1:]
        sought = [f"{'|' * bool(name)}{name}:{kind}|" for kind in kinds]
        conditions.append((f"({' OR '.join(['instr(calls, ?)'] * len(sought))})", sought))
    elif name:
        conditions.append(("instr(calls, ?)", [f"|{name}:"]))
    return conditions


def _conditions(query: SampleQuery) -> tuple[str, tuple[Any, ...]]:
    """Build a WHERE clause and the values of its parameters."""
    conditions: list[str] = []
    values: list[Any] = []
    for column, bounds in (("step", query.steps), ("reward", query.rewards), ("staleness", query.staleness)):
        if bounds is not None:
            conditions.append(f"{column} BETWEEN ? AND ?")
            values += bounds
    if query.statuses:
        conditions.append(f"status IN ({', '.join('?' * len(query.statuses))})")
        values += query.statuses
    if inner := _calls(query):
        columns = "(step, ticket_id, trajectory)"
        texts, found = zip(*inner, strict=True)
        conversations = f"SELECT step, ticket_id, trajectory FROM conversations WHERE {' AND '.join(texts)}"
        conditions.append(f"{columns} IN ({conversations})")
        values += [value for given in found for value in given]
    if query.prompt:
        conditions.append("prompt_id IN (SELECT prompt_id FROM prompts WHERE instr(folded, ?))")
        values.append(query.prompt.casefold())
    return f"WHERE {' AND '.join(conditions)}" if conditions else "", tuple(values)
