"""The index's SQLite tables: what lists and filters need of every sample, and what the journal does not hold."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.journal.sample_rows import IndexedGroup

INDEX_FILE = "samples.sqlite"
SCHEMA = 1
"""Kept as SQLite's user_version. The index is derived data: one of another schema is made anew."""
NOT_TRAINED = 1 << 62
"""As a step: later than any."""
TABLES = f"""
CREATE TABLE prompts (
    prompt_id INTEGER PRIMARY KEY, row_id TEXT NOT NULL, text TEXT NOT NULL, folded TEXT NOT NULL,
    messages TEXT NOT NULL, answer TEXT NOT NULL, media TEXT NOT NULL);
CREATE TABLE groups (
    ticket_id INTEGER PRIMARY KEY, step INTEGER NOT NULL, prompt_id INTEGER NOT NULL, server_id TEXT NOT NULL);
CREATE INDEX groups_by_step ON groups (step);
CREATE TABLE trained_tokens (ticket_id INTEGER PRIMARY KEY, differences BLOB NOT NULL, masked BLOB);
CREATE TABLE trajectories (
    ticket_id INTEGER NOT NULL, trajectory INTEGER NOT NULL, step INTEGER NOT NULL, prompt_id INTEGER NOT NULL,
    status TEXT NOT NULL, finish_reason TEXT NOT NULL, reward REAL, advantage REAL, length INTEGER NOT NULL,
    staleness INTEGER NOT NULL, logprob_diff_max REAL, error TEXT NOT NULL,
    PRIMARY KEY (step, ticket_id, trajectory)) WITHOUT ROWID;
CREATE INDEX best ON trajectories (reward DESC, step DESC, ticket_id DESC, trajectory);
CREATE INDEX stalest ON trajectories (staleness DESC, step DESC, ticket_id DESC, trajectory);
CREATE INDEX longest ON trajectories (length DESC, step DESC, ticket_id DESC, trajectory);
PRAGMA user_version = {SCHEMA};
"""


def insert_groups(db: sqlite3.Connection, groups: Sequence[IndexedGroup]) -> None:
    """In the caller's transaction. What is there of these tickets is replaced."""
    rows = (row for group in groups for row in group.trajectories)
    tokens = [group.trained_tokens for group in groups if group.trained_tokens is not None]
    db.executemany(f"INSERT OR IGNORE INTO prompts VALUES ({_marks(7)})", [group.prompt for group in groups])
    db.executemany(f"INSERT OR REPLACE INTO groups VALUES ({_marks(4)})", [group.group for group in groups])
    db.executemany(f"INSERT OR REPLACE INTO trajectories VALUES ({_marks(12)})", rows)
    db.executemany(f"INSERT OR REPLACE INTO trained_tokens VALUES ({_marks(3)})", tokens)


def _marks(columns: int) -> str:
    return ", ".join("?" * columns)


def remove_groups(db: sqlite3.Connection, where: str, values: tuple[int, ...]) -> int:
    """How many there were. Prompts stay: another group may have them."""
    found = f"(SELECT ticket_id FROM groups WHERE {where})"
    steps = f"(SELECT step FROM groups WHERE {where})"  # what the rows of a trajectory lie in the order of
    db.execute(f"DELETE FROM trained_tokens WHERE ticket_id IN {found}", values)
    db.execute(f"DELETE FROM trajectories WHERE step IN {steps} AND ticket_id IN {found}", values * 2)
    return db.execute(f"DELETE FROM groups WHERE {where}", values).rowcount
