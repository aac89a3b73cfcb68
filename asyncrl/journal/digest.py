"""How a damaged journal is told from a sound one: a digest of every row, and the number of the last commit.

SQLite checks the shape of its pages but not the values in them, and ends a damaged write-ahead log early, without a
word. So every transaction leaves behind the sum of its rows' hashes, and a file of its own holds the last commit's
number.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import xxhash

from asyncrl.errors import BadStateError

_SEALED = {
    "meta": "SELECT key, value FROM meta",
    "ledger": "SELECT name, count FROM ledger WHERE count != 0",
    "tickets": "SELECT ticket_id, position, version, bound FROM tickets",
    "groups": "SELECT ticket_id, segment, offset, length, checksum FROM groups",
    "consumption": "SELECT position, ticket_id, version, bound, step FROM consumption",
    "again": "SELECT position FROM again",
}
"""What the digest is of. The checksum of a group stands for its payload; a counter of 0 counts like none."""


class ContentDigest:
    """The sum of all rows' hashes, modulo 2^64: it follows every insertion and deletion without reading the rest."""

    def __init__(self, value: int = 0):
        self.value = value

    @classmethod
    def of(cls, db: sqlite3.Connection) -> ContentDigest:
        digest = cls()
        for table, query in _SEALED.items():
            digest.add(table, db.execute(query))
        return digest

    def add(self, table: str, rows: Iterable[tuple[int | str | bytes, ...]]) -> None:
        self.value = (self.value + sum(_row_hash(table, row) for row in rows)) % 2**64

    def remove(self, table: str, rows: Iterable[tuple[int | str | bytes, ...]]) -> None:
        self.value = (self.value - sum(_row_hash(table, row) for row in rows)) % 2**64

    def to_bytes(self) -> bytes:
        return self.value.to_bytes(8, "little")


def _row_hash(table: str, row: tuple[int | str | bytes, ...]) -> int:
    return xxhash.xxh3_64_intdigest(f"{table}{row!r}".encode())


class CommitMark:
    """A file of 20 digits next to the journal, written after every commit."""

    def __init__(self, journal: Path):
        self.path = journal.with_name(journal.name + ".commits")
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def read(self) -> int:
        """0 where nothing is written yet."""
        content = os.pread(self._fd, 64, 0)
        try:
            return int(content) if content else 0
        except ValueError as problem:
            raise BadStateError(
                f"{self.path} should hold the number of the journal's last commit, and holds {content!r}. Restore it "
                "and the journal from a backup; without it nobody can tell whether the journal is whole"
            ) from problem

    def write(self, commits: int) -> None:
        os.pwrite(self._fd, b"%020d" % commits, 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
