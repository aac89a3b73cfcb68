"""A SampleQuery as SQL, over one or several databases with the tables of the index."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from asyncrl.errors import UserError
from asyncrl.journal.sample_index import NOT_TRAINED
from asyncrl.tools.samples.model import SampleQuery, SampleRow

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
_COLUMNS = {"best": ", reward", "worst": ", reward", "stalest": ", staleness", "longest": ", length"}
"""Columns that an order needs beside the key. More columns would be looked up for every row that is passed over."""


def count(db: sqlite3.Connection, sources: Sequence[str], query: SampleQuery) -> int:
    where, values = _conditions(query)
    return sum(
        db.execute(f"SELECT COUNT(*) FROM {source}.trajectories {where.format(source=source)}", values).fetchone()[0]
        for source in sources
    )


def find(
    db: sqlite3.Connection, sources: Sequence[str], query: SampleQuery, limit: int, offset: int
) -> list[tuple[str, int, int]]:
    """Return source, ticket and trajectory of the rows of a page."""
    if query.order not in _ORDERS:
        raise UserError(f"samples can be in the order {', '.join(_ORDERS)}, not {query.order!r}")
    where, values = _conditions(query)
    columns = f"ticket_id, trajectory, step{_COLUMNS.get(query.order, '')}"
    parts = [f"SELECT '{s}' AS source, {columns} FROM {s}.trajectories {where.format(source=s)}" for s in sources]
    sql = f"{' UNION ALL '.join(parts)} ORDER BY {_ORDERS[query.order]} LIMIT ? OFFSET ?"
    return [row[:3] for row in db.execute(sql, (*values * len(sources), limit, offset)).fetchall()]


def read_group(db: sqlite3.Connection, source: str, ticket_id: int, *, has_payload: bool) -> tuple[SampleRow, ...]:
    """Read the rows of a ticket's trajectories; none if the source has no such ticket."""
    rows = db.execute(
        "SELECT trajectory, step, row_id, text, answer, status, finish_reason, reward, advantage, length, staleness, "
        f"logprob_diff_max, error FROM {source}.trajectories JOIN {source}.prompts USING (prompt_id) "
        f"WHERE step = (SELECT step FROM {source}.groups WHERE ticket_id = ?1) AND ticket_id = ?1 ORDER BY trajectory",
        (ticket_id,),
    ).fetchall()
    return tuple(
        SampleRow(
            ticket_id,
            trajectory,
            None if step == NOT_TRAINED else step,
            row_id,
            text if len(text) <= PROMPT_SHOWN else f"{text[:PROMPT_SHOWN]}…",
            *rest,
            has_payload=has_payload,
        )
        for trajectory, step, row_id, text, *rest in rows
    )


def _conditions(query: SampleQuery) -> tuple[str, tuple[Any, ...]]:
    """Build a WHERE clause with a place for the source's name, and the values of its parameters."""
    conditions: list[str] = []
    values: list[Any] = []
    for column, bounds in (("step", query.steps), ("reward", query.rewards), ("staleness", query.staleness)):
        if bounds is not None:
            conditions.append(f"{column} BETWEEN ? AND ?")
            values += bounds
    if query.statuses:
        conditions.append(f"status IN ({', '.join('?' * len(query.statuses))})")
        values += query.statuses
    if query.prompt:
        conditions.append("prompt_id IN (SELECT prompt_id FROM {source}.prompts WHERE instr(folded, ?))")
        values.append(query.prompt.casefold())
    return f"WHERE {' AND '.join(conditions)}" if conditions else "", tuple(values)
