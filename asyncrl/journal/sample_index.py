"""The index of samples, samples.sqlite beside the journal: its tables, a group as rows of them, and its writer.

The index holds what lists and filters need of every sample, and what the journal does not hold: advantages and the
learner's log-probs. It is derived data without seal and syncs: steps that are made again write their rows again.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from asyncrl.rewards.presentation import plain_text
from asyncrl.run_folder.full_disk import find_no_room
from protocol.messages import Group, Prompt, TrajectoryRecord

logger = logging.getLogger(__name__)

INDEX_FILE = "samples.sqlite"
SCHEMA = 1
"""SQLite's user_version. An index of another schema is begun anew."""
NOT_TRAINED = 1 << 62
"""The step of a group that no step has consumed yet: later than any."""
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


@dataclass(frozen=True)
class TrainedBatch:
    """Results of a step for its batch: `B` rows are trajectories, `M` runs over their tokens."""

    advantages: np.ndarray
    """[B] fp32"""
    logprobs: np.ndarray
    """[M] fp32 of the learner's policy, as in the step's metrics; NaN where nothing was trained."""
    masked: np.ndarray
    """[M] bool: the correction dropped the token."""

    def part(self, first_row: int, rows: int, first_token: int, tokens: int) -> TrainedBatch:
        """Cut out `rows` consecutive trajectories with their tokens."""
        part = slice(first_token, first_token + tokens)
        return TrainedBatch(self.advantages[first_row : first_row + rows], self.logprobs[part], self.masked[part])


@dataclass(frozen=True)
class PromptText:
    """The text of a prompt, and the hashes of its media."""

    row_id: str
    messages: tuple[dict[str, str], ...]
    answer: str
    images: tuple[str, ...]
    """Content hashes."""
    videos: tuple[tuple[str, int], ...] = ()
    """Hash of the first frame, and number of frames."""

    @classmethod
    def of(cls, prompt: Prompt) -> PromptText:
        answer = prompt.answer if isinstance(prompt.answer, str) else _json(prompt.answer)
        return cls(
            prompt.row_id,
            tuple({"role": message.role, "content": plain_text(message)} for message in prompt.messages),
            "" if prompt.answer is None else _storable(answer),
            prompt.image_hashes,
            tuple((video.frame_hashes[0], len(video.frame_hashes)) for video in prompt.videos),
        )

    def row(self) -> tuple[int, str, str, str, str, str, str]:
        """The prompt as a row of its table; equal prompts have equal ids."""
        messages, media = json.dumps(self.messages), json.dumps([self.images, self.videos])
        content = "\0".join((self.row_id, messages, self.answer, media)).encode(errors="surrogatepass")
        text = _storable(self.messages[-1]["content"])
        prompt_id = xxhash.xxh3_64_intdigest(content) >> 1
        return prompt_id, _storable(self.row_id), text, text.casefold(), messages, self.answer, media

    @classmethod
    def from_row(cls, row_id: str, messages: str, answer: str, media: str) -> PromptText:
        images, videos = json.loads(media)
        return cls(row_id, tuple(json.loads(messages)), answer, tuple(images), tuple(map(tuple, videos)))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _storable(text: str) -> str:
    """Escape lone surrogates, which SQLite does not take."""
    return text.encode(errors="backslashreplace").decode()


# --- a group as rows ------------------------------------------------------------------------------


def insert_group(
    db: sqlite3.Connection,
    group: Group,
    prompt: PromptText,
    *,
    step: int | None,
    version: int,
    trained: TrainedBatch | None = None,
) -> None:
    """Write a group in the caller's transaction, in place of what its ticket had.

    `version` consumed it at `step`, or would consume it now where `step` is None. `trained` is None where it is not
    known.
    """
    ticket_id, at, prompt_row = group.ticket_id, NOT_TRAINED if step is None else step, prompt.row()
    differences = None if trained is None else trained.logprobs - group.logprobs
    staleness, largest = _extremes(group, version, differences)
    advantages = [None] * len(group.trajectories) if trained is None else _or_none(trained.advantages)
    rows = [
        (
            ticket_id,
            number,
            at,
            prompt_row[0],
            str(record.status),
            str(record.finish_reason),
            record.reward,
            advantages[number],
            length,
            staleness[number],
            largest[number],
            _error(record),
        )
        for number, (record, length) in enumerate(zip(group.trajectories, group.lengths.tolist(), strict=True))
    ]
    db.execute(f"INSERT OR IGNORE INTO prompts VALUES ({_marks(7)})", prompt_row)
    db.execute(f"INSERT OR REPLACE INTO groups VALUES ({_marks(4)})", (ticket_id, at, prompt_row[0], group.server_id))
    db.executemany(f"INSERT OR REPLACE INTO trajectories VALUES ({_marks(12)})", rows)
    if trained is not None and differences is not None:
        masked = np.packbits(trained.masked).tobytes() if trained.masked.any() else None
        with np.errstate(over="ignore"):  # a difference too large for fp16 is stored as infinite
            tokens = (ticket_id, differences.astype(np.float16).tobytes(), masked)
        db.execute(f"INSERT OR REPLACE INTO trained_tokens VALUES ({_marks(3)})", tokens)


def read_trained_tokens(db: sqlite3.Connection, schema: str, group: Group) -> tuple[np.ndarray | None, np.ndarray]:
    """Read [N] the learner's log-probs (None where they are not known) and [N] whether the correction dropped a token.

    `schema` names the database of the connection that holds the index.
    """
    total = group.token_ids.size
    row = db.execute(
        f"SELECT differences, masked FROM {schema}.trained_tokens WHERE ticket_id = ?", (group.ticket_id,)
    ).fetchone()
    if row is None:
        return None, np.zeros(total, bool)
    learner = group.logprobs + np.frombuffer(row[0], np.float16).astype(np.float32)
    masked = np.frombuffer(row[1] or bytes(total // 8 + 1), np.uint8)
    return learner, np.unpackbits(masked, count=total).astype(bool)


def remove_groups(db: sqlite3.Connection, where: str, values: tuple[int, ...]) -> int:
    """Delete groups and return their number. Their prompts stay: another group may have them."""
    tickets = f"(SELECT ticket_id FROM groups WHERE {where})"
    steps = f"(SELECT step FROM groups WHERE {where})"  # the primary key of trajectories begins with the step
    db.execute(f"DELETE FROM trained_tokens WHERE ticket_id IN {tickets}", values)
    db.execute(f"DELETE FROM trajectories WHERE step IN {steps} AND ticket_id IN {tickets}", values * 2)
    return db.execute(f"DELETE FROM groups WHERE {where}", values).rowcount


def _marks(columns: int) -> str:
    return ", ".join("?" * columns)


def _error(record: TrajectoryRecord) -> str:
    return _storable(": ".join(filter(None, (record.error_kind, record.error_message)))) if record.error_kind else ""


def _extremes(group: Group, version: int, differences: np.ndarray | None) -> tuple[list[int], list[float | None]]:
    """Compute, for each trajectory, the staleness of its oldest sampled token and the largest absolute difference."""
    size = len(group.trajectories)
    oldest, largest = np.full(size, version, np.int64), np.full(size, np.nan)
    some = np.flatnonzero(group.lengths)
    if some.size:
        starts = (np.cumsum(group.lengths) - group.lengths)[some]
        oldest[some] = np.minimum.reduceat(np.where(group.loss_mask == 1, group.versions, version), starts)
        if differences is not None:
            largest[some] = np.fmax.reduceat(np.abs(differences), starts)
    return (version - oldest).tolist(), _or_none(largest)


def _or_none(values: np.ndarray) -> list[float | None]:
    """Convert to Python numbers, with None for NaN."""
    return [None if value != value else value for value in values.tolist()]


# --- the learner's writer ---------------------------------------------------------------------------


class SampleIndex:
    """The learner writes, one transaction per step; any number of readers look on. The first write makes the file."""

    def __init__(self, run_dir: Path):
        self._path = Path(run_dir) / INDEX_FILE
        self._open: sqlite3.Connection | None = None

    def write(self, step: int, version: int, batch: Sequence[tuple[Prompt, Group]], trained: TrainedBatch) -> None:
        """Add the batch that `version` consumed at `step`."""
        try:
            self._write(step, version, batch, trained)
        except sqlite3.DatabaseError as problem:
            if not _is_useless(problem):
                raise
            self.close()
            _remove(self._path, problem)
            self._write(step, version, batch, trained)

    def _write(self, step: int, version: int, batch: Sequence[tuple[Prompt, Group]], trained: TrainedBatch) -> None:
        row = token = 0
        with self._transaction() as db:
            for prompt, group in batch:
                rows, tokens = len(group.trajectories), int(group.lengths.sum())
                part = trained.part(row, rows, token, tokens)
                insert_group(db, group, PromptText.of(prompt), step=step, version=version, trained=part)
                row, token = row + rows, token + tokens

    def truncate_after(self, step: int) -> None:
        """Forget later steps: the run goes on from `step`, with other groups."""
        if self._path.exists():
            with self._transaction() as db:
                dropped = remove_groups(db, "step > ?", (step,))
            if dropped:
                logger.info("resuming after step %d: dropped %d later groups of %s", step, dropped, self._path.name)

    def forget_tokens(self, before_step: int) -> None:
        """Drop the token columns of earlier steps, whose groups the journal does not keep any more."""
        if self._path.exists():
            with self._transaction() as db:
                db.execute(
                    "DELETE FROM trained_tokens WHERE ticket_id IN (SELECT ticket_id FROM groups WHERE step < ?)",
                    (before_step,),
                )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Raises OSError where the disk has no room and SQLite does not say so."""
        try:
            if self._open is None:
                self._open = open_index(self._path)
            with self._open as db:
                db.execute("BEGIN")
                yield db
        except sqlite3.Error as problem:
            if full := find_no_room(problem, self._path):
                raise full from problem
            raise

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def open_index(path: Path) -> sqlite3.Connection:
    """Open the index for writing. A damaged file, or one of another schema, is begun anew with a warning."""
    try:
        return _open(path)
    except sqlite3.DatabaseError as problem:
        if not _is_useless(problem):
            raise
        _remove(path, problem)
        return _open(path)


def _is_useless(problem: sqlite3.DatabaseError) -> bool:
    code = getattr(problem, "sqlite_errorcode", sqlite3.SQLITE_SCHEMA)  # SQLITE_SCHEMA: raised by _open itself
    return code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_SCHEMA)


def _remove(path: Path, problem: sqlite3.DatabaseError) -> None:
    logger.warning(
        "%s cannot be used (%s): it is begun anew. When the run is over, asyncrl inspect %s --reindex adds the samples "
        "of earlier steps",
        path,
        problem,
        path.parent,
    )
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        path.with_name(name).unlink(missing_ok=True)


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None)
    try:
        (schema,) = db.execute("PRAGMA user_version").fetchone()
        if schema not in (0, SCHEMA):
            raise sqlite3.DatabaseError(f"schema {schema}, expected {SCHEMA}")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = OFF")  # a power cut may damage the file: it can be made again
        if schema == 0:
            db.executescript(f"BEGIN; {TABLES} COMMIT;")
    except BaseException:
        db.close()
        raise
    return db
