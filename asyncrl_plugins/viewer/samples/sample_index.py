"""The index of samples, samples.sqlite beside the journal: its tables, a group as rows of them, and its writer.

The index holds what lists and filters need of every sample, and what the journal does not hold: advantages and the
learner's log-probs. It has no seal: steps that are made again write their rows again.
"""

from __future__ import annotations

import json
import logging
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from asyncrl.errors import BadStateError
from asyncrl.journal.full_disk import find_no_room
from asyncrl.rewards.sample import plain_message
from asyncrl.user_functions import storable
from protocol.messages import Group, Prompt, TrajectoryRecord
from protocol.values import as_json

if TYPE_CHECKING:  # imports torch
    from learner.training.batch import TrainedBatch

logger = logging.getLogger(__name__)

INDEX_FILE = "samples.sqlite"
SCHEMA = 2
"""SQLite's user_version."""
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
CREATE TABLE conversations (
    ticket_id INTEGER NOT NULL, trajectory INTEGER NOT NULL, step INTEGER NOT NULL, ended TEXT NOT NULL,
    calls TEXT NOT NULL, PRIMARY KEY (step, ticket_id, trajectory)) WITHOUT ROWID;
CREATE INDEX best ON trajectories (reward DESC, step DESC, ticket_id DESC, trajectory);
CREATE INDEX stalest ON trajectories (staleness DESC, step DESC, ticket_id DESC, trajectory);
CREATE INDEX longest ON trajectories (length DESC, step DESC, ticket_id DESC, trajectory);
PRAGMA user_version = {SCHEMA};
"""


@dataclass(frozen=True)
class PromptText:
    """The text of a prompt, and the hashes of its media."""

    row_id: str
    messages: tuple[dict[str, Any], ...]
    answer: str
    images: tuple[str, ...]
    """Content hashes."""
    videos: tuple[tuple[str, int], ...] = ()
    """Hash of the first frame, and number of frames."""

    @classmethod
    def of(cls, prompt: Prompt) -> PromptText:
        answer = prompt.answer if isinstance(prompt.answer, str) else _json(as_json(prompt.answer))
        return cls(
            prompt.row_id,
            tuple(map(plain_message, prompt.messages)),
            "" if prompt.answer is None else storable(answer),
            prompt.image_hashes,
            tuple((video.frame_hashes[0], len(video.frame_hashes)) for video in prompt.videos),
        )

    def row(self) -> tuple[int, str, str, str, str, str, str]:
        """The prompt as a row of its table; equal prompts have equal ids."""
        messages, media = json.dumps(self.messages), json.dumps([self.images, self.videos])
        content = "\0".join((self.row_id, messages, self.answer, media)).encode(errors="surrogatepass")
        text = storable(self.messages[-1]["content"])
        prompt_id = xxhash.xxh3_64_intdigest(content) >> 1
        return prompt_id, storable(self.row_id), text, text.casefold(), messages, self.answer, media

    @classmethod
    def from_row(cls, row_id: str, messages: str, answer: str, media: str) -> PromptText:
        images, videos = json.loads(media)
        return cls(row_id, tuple(json.loads(messages)), answer, tuple(images), tuple(map(tuple, videos)))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


# --- a group as rows ------------------------------------------------------------------------------


def insert_group(
    db: sqlite3.Connection,
    group: Group,
    prompt: PromptText,
    *,
    step: int,
    version: int,
    trained: TrainedBatch | None = None,
) -> None:
    """Write a group that `version` consumed at `step`, in place of what its ticket had, in the caller's transaction.

    `trained` is None where it is not known.
    """
    ticket_id, prompt_row = group.ticket_id, prompt.row()
    differences = None if trained is None else trained.logprobs - group.logprobs
    staleness, largest = _extremes(group, version, differences)
    advantages = [None] * len(group.trajectories) if trained is None else _or_none(trained.advantages)
    rows = [
        (
            ticket_id,
            number,
            step,
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
    db.execute(f"INSERT OR REPLACE INTO groups VALUES ({_marks(4)})", (ticket_id, step, prompt_row[0], group.server_id))
    db.executemany(f"INSERT OR REPLACE INTO trajectories VALUES ({_marks(12)})", rows)
    conversations = [
        (ticket_id, number, step, record.end, calls_text(record))
        for number, record in enumerate(group.trajectories)
        if record.is_answered
    ]
    db.executemany(f"INSERT OR REPLACE INTO conversations VALUES ({_marks(5)})", conversations)
    if trained is not None and differences is not None:
        masked = np.packbits(trained.masked).tobytes() if trained.masked.any() else None
        with np.errstate(over="ignore"):  # a difference too large for fp16 is stored as infinite
            tokens = (ticket_id, differences.astype(np.float16).tobytes(), masked)
        db.execute(f"INSERT OR REPLACE INTO trained_tokens VALUES ({_marks(3)})", tokens)


def calls_text(record: TrajectoryRecord) -> str:
    """The different calls of a trajectory, to be searched: `|crop:|search:tool|`, the kind of error behind the name."""
    calls = dict.fromkeys(f"{call_name(call.name)}:{call.error_kind}" for turn in record.turns for call in turn.calls)
    return f"|{'|'.join(calls)}|" if calls else ""


def call_name(name: str) -> str:
    """A tool's name as `calls_text` has it."""
    return storable(re.sub(r"[|:]", "_", name))


def read_trained_tokens(db: sqlite3.Connection, group: Group) -> tuple[np.ndarray | None, np.ndarray]:
    """Read [N] the learner's log-probs, None where unknown, and [N] whether the correction dropped a token."""
    total = group.token_ids.size
    row = db.execute(
        "SELECT differences, masked FROM trained_tokens WHERE ticket_id = ?", (group.ticket_id,)
    ).fetchone()
    if row is None:
        return None, np.zeros(total, bool)
    learner = group.logprobs + np.frombuffer(row[0], np.float16).astype(np.float32)
    masked = np.frombuffer(row[1] or bytes(total // 8 + 1), np.uint8)
    return learner, np.unpackbits(masked, count=total).astype(bool)


def _marks(columns: int) -> str:
    return ", ".join("?" * columns)


def _error(record: TrajectoryRecord) -> str:
    return storable(": ".join(filter(None, (record.error_kind, record.error_message)))) if record.error_kind else ""


def _extremes(group: Group, version: int, differences: np.ndarray | None) -> tuple[list[int], list[float | None]]:
    """Compute, for each trajectory, the staleness of its oldest sampled token and the largest absolute difference of
    one: what was put there has no log-prob of an engine to differ from."""
    size = len(group.trajectories)
    oldest, largest = np.full(size, version, np.int64), np.full(size, np.nan)
    some = np.flatnonzero(group.lengths)
    if some.size:
        starts = (np.cumsum(group.lengths) - group.lengths)[some]
        is_sampled = group.is_sampled
        oldest[some] = np.minimum.reduceat(np.where(is_sampled, group.versions, version), starts)
        if differences is not None:
            largest[some] = np.fmax.reduceat(np.where(is_sampled, np.abs(differences), np.nan), starts)
    return (version - oldest).tolist(), _or_none(largest)


def _or_none(values: np.ndarray) -> list[float | None]:
    """Convert to Python numbers, with None for NaN."""
    return [None if value != value else value for value in values.tolist()]


# --- the learner's writer ---------------------------------------------------------------------------


class SampleIndex:
    """The learner's SampleWriter (learner/reporting/samples.py): one transaction per step, while any number of readers
    look on. The first write makes the file."""

    def __init__(self, run_dir: Path):
        self._path = Path(run_dir) / INDEX_FILE
        self._db: sqlite3.Connection | None = None

    def write(self, step: int, version: int, batch: Sequence[tuple[Prompt, Group]], trained: TrainedBatch) -> None:
        """Add the batch that `version` consumed at `step`."""
        row = token = 0
        with self._transaction() as db:
            for prompt, group in batch:
                rows, tokens = len(group.trajectories), int(group.lengths.sum())
                part = trained.part(row, rows, token, tokens)
                insert_group(db, group, PromptText.of(prompt), step=step, version=version, trained=part)
                row, token = row + rows, token + tokens

    def truncate_after(self, step: int) -> None:
        """Forget later steps: the run goes on from `step`, with other groups. Prompts stay: others may have them."""
        if self._path.exists():
            with self._transaction() as db:
                _forget_tokens(db, "step > ?", step)
                db.execute("DELETE FROM trajectories WHERE step > ?", (step,))
                db.execute("DELETE FROM conversations WHERE step > ?", (step,))
                dropped = db.execute("DELETE FROM groups WHERE step > ?", (step,)).rowcount
            if dropped:
                logger.info("resuming after step %d: dropped %d later groups of %s", step, dropped, self._path.name)

    def forget_tokens(self, before_step: int) -> None:
        """Drop the token columns of earlier steps, whose groups the journal does not keep any more."""
        if self._path.exists():
            with self._transaction() as db:
                _forget_tokens(db, "step < ?", before_step)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Raises OSError where the disk has no room, BadStateError where the file is damaged."""
        try:
            if self._db is None:
                self._db = _open(self._path)
            with self._db as db:
                db.execute("BEGIN")
                yield db
        except sqlite3.OperationalError as problem:
            if full := find_no_room(problem, self._path):
                raise full from problem
            raise
        except sqlite3.DatabaseError as problem:
            raise BadStateError(
                f"{self._path} cannot be written: {problem}. It only lists samples: move it away, and --resume"
            ) from problem

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


def _forget_tokens(db: sqlite3.Connection, steps: str, step: int) -> None:
    db.execute(f"DELETE FROM trained_tokens WHERE ticket_id IN (SELECT ticket_id FROM groups WHERE {steps})", (step,))


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")  # a power cut loses the newest steps, and damages nothing
        (schema,) = db.execute("PRAGMA user_version").fetchone()
        if schema == 0:
            db.executescript(f"BEGIN; {TABLES} COMMIT;")
        elif schema != SCHEMA:
            raise sqlite3.DatabaseError(f"it has schema {schema}, and this version of asyncrl writes schema {SCHEMA}")
    except BaseException:
        db.close()
        raise
    return db
