"""Look at a run's samples, while it trains or after it. Loads no torch; reads only.

Lists come from the index (`samples.sqlite`), a group in full from the journal, as long as it is kept. A missing index
is made in memory, of the groups that the journal keeps.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.errors import UserError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.database import JournalReader, read_only_uri
from asyncrl.run_folder.failure import is_there
from asyncrl_plugins.viewer.samples import query as queries
from asyncrl_plugins.viewer.samples.model import (
    Page,
    SampleDetail,
    SampleImage,
    SampleQuery,
    SampleRow,
    SampleTurn,
    ShownMessage,
    TrajectoryDetail,
)
from asyncrl_plugins.viewer.samples.sample_index import (
    INDEX_FILE,
    SCHEMA,
    TABLES,
    PromptText,
    insert_group,
    read_trained_tokens,
)
from asyncrl_plugins.viewer.samples.sources import RunRows, TokenTexts, prompt_of_tokens, read_run_config
from protocol.messages import Group, ObservedImage, ObservedMessage, TextPart, TrajectoryRecord

BEGINNING = 64
"""Tokens of a completion that a list shows."""
NOT_KEPT = "its tokens are no longer kept (trainer.keep_samples_gib)"
DAMAGED = "its tokens cannot be read: {} is {}. Restore that file, or copy the run directory again"


class SampleStore:
    """The samples of one run; thread-safe."""

    def __init__(self, run_dir: Path):
        """Raises UserError where there is no run, or it cannot be read."""
        self.run_dir = Path(run_dir)
        journal = self.run_dir / JOURNAL_FILE
        if not is_there(journal):
            raise UserError(f"there is no run in {self.run_dir}: it has no {JOURNAL_FILE}")
        config = read_run_config(self.run_dir)
        batch = config.get("batch")
        size = batch.get("group_size") if isinstance(batch, dict) else None
        self._group_size = size if isinstance(size, int) else None
        """Completions of a group before a greedy one; None: not known."""
        rollout = config.get("rollout")
        self._quantization = str(rollout.get("quantization") or "") if isinstance(rollout, dict) else ""
        self._lock = threading.RLock()
        self._journal = JournalReader(journal)
        self._texts = TokenTexts(self.run_dir, config)
        self._rows = RunRows(self.run_dir, config)
        self._file = self.run_dir / INDEX_FILE
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._is_file = False
        self._seen = 0
        """State of the journal of which the index in memory is made; 0 for none."""

    def find(self, query: SampleQuery, *, limit: int = 50, offset: int = 0) -> Page:
        """Return a page of the samples that match, and their number."""
        with self._reading() as db:
            keys = queries.find(db, query, limit, offset)
            groups = {ticket_id: self._rows_of(db, ticket_id) for ticket_id in {ticket_id for ticket_id, _ in keys}}
            return Page(tuple(groups[ticket_id][number] for ticket_id, number in keys), queries.count(db, query))

    def detail(self, ticket_id: int) -> SampleDetail:
        """Return a group in full. Raises UserError where no such ticket was trained."""
        with self._reading() as db:
            return self._detail(db, ticket_id)

    def close(self) -> None:
        with self._lock:
            self._index.close()
            self._journal.close()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._open_index()
            except sqlite3.DatabaseError as problem:
                raise UserError(
                    f"{self._file} cannot be read: {problem}. Move it away; inspect then reads the journal"
                ) from problem

    def _open_index(self) -> sqlite3.Connection:
        """Open the index file; until the learner has made it, an index in memory follows the journal."""
        if self._is_file:
            return self._index
        written, seen = _open(self._file), self._journal.changes
        if written is not None or seen != self._seen:
            self._index.close()
            self._index = written or self._index_in_memory()
            self._is_file, self._seen = written is not None, seen
        return self._index

    def _index_in_memory(self) -> sqlite3.Connection:
        db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        db.executescript(TABLES)
        for ticket_id, step in self._journal.kept().items():
            if (group := self._journal.find_group(ticket_id)) is not None:
                insert_group(db, group, prompt_of_tokens(group, self._texts), step=step, version=step - 1)
        return db

    def _rows_of(self, db: sqlite3.Connection, ticket_id: int) -> tuple[SampleRow, ...]:
        """Read the rows of a group, with the first words of each completion."""
        rows, group = self._read_group(db, ticket_id)
        if group is None:
            return rows
        starts = np.cumsum(group.lengths) - group.lengths
        firsts = [slice(s, s + min(n, BEGINNING)) for s, n in zip(starts, group.lengths, strict=True)]
        texts = [self._texts.plain(group.token_ids[first]) for first in firsts]
        return tuple(replace(row, completion=text) for row, text in zip(rows, texts, strict=True))

    def _read_group(self, db: sqlite3.Connection, ticket_id: int) -> tuple[tuple[SampleRow, ...], Group | None]:
        """Read the rows of a group, none if it is not known, and the group as long as the journal keeps it."""
        group = self._journal.find_group(ticket_id)
        rows = queries.read_group(db, ticket_id, has_payload=group is not None)
        if self._group_size is not None:
            rows = tuple(replace(row, greedy=row.trajectory >= self._group_size) for row in rows)
        if group is not None:
            rows = tuple(replace(row, put_there=_put_there(group, row.trajectory)) for row in rows)
        return rows, group

    def _detail(self, db: sqlite3.Connection, ticket_id: int) -> SampleDetail:
        rows, group = self._read_group(db, ticket_id)
        if not rows:
            raise UserError(f"{self.run_dir} has no sample of ticket {ticket_id}")
        *row, server_id = db.execute(
            "SELECT row_id, messages, answer, media, server_id FROM groups JOIN prompts USING (prompt_id) "
            "WHERE ticket_id = ?",
            (ticket_id,),
        ).fetchone()
        prompt = PromptText.from_row(*row)
        problem, lost = self._texts.problem, None
        if group is not None:
            trajectories = self._trajectories(db, rows, group)
        else:
            trajectories = tuple(TrajectoryDetail(row) for row in rows)
            lost = self._journal.lost_in(ticket_id)
            state = "cut off or damaged" if lost and lost.exists() else "missing"
            problem = DAMAGED.format(lost, state) if lost else NOT_KEPT
        return SampleDetail(
            ticket_id=ticket_id,
            server_id=server_id,
            row_id=prompt.row_id,
            messages=tuple(map(_with_calls, prompt.messages)),
            images=self._rows.images(prompt),
            answer=prompt.answer,
            trajectories=trajectories,
            problem=problem,
            opening=_messages(group.opening, group) if group is not None else (),
            quantization=self._quantization,
            is_damaged=lost is not None,
        )

    def _trajectories(
        self, db: sqlite3.Connection, rows: Sequence[SampleRow], group: Group
    ) -> tuple[TrajectoryDetail, ...]:
        learner, masked = read_trained_tokens(db, group)
        ends = np.cumsum(group.lengths)
        parts = [slice(int(end - length), int(end)) for end, length in zip(ends, group.lengths, strict=True)]
        return tuple(
            TrajectoryDetail(
                row,
                rewards=record.rewards,
                tokens=self._texts.each(group.token_ids[part]),
                token_ids=group.token_ids[part],
                logprobs=group.logprobs[part],
                learner_logprobs=None if learner is None else learner[part],
                versions=group.versions[part],
                source=group.source[part],
                masked=masked[part],
                turns=_turns(record, group),
                limit=record.limit,
            )
            for row, record, part in zip(rows, group.trajectories, parts, strict=True)
        )


def _put_there(group: Group, trajectory: int) -> int:
    """Number of tokens before the first sampled one."""
    sampled = group.is_sampled[group.span(trajectory)]
    return int(sampled.argmax()) if sampled.any() else sampled.size


def _turns(record: TrajectoryRecord, group: Group) -> tuple[SampleTurn, ...]:
    if all(turn.reward is None and not turn.observation for turn in record.turns):  # nobody has answered
        return ()
    return tuple(
        SampleTurn(
            turn.start,
            turn.end,
            str(turn.finish_reason or record.finish_reason),
            turn.reward,
            _messages(turn.observation, group),
            turn.calls,
            turn.info,
            turn.context,
        )
        for turn in record.turns
    )


def _messages(messages: Sequence[ObservedMessage], group: Group) -> tuple[ShownMessage, ...]:
    def shown(part: TextPart | ObservedImage) -> str | SampleImage:
        if isinstance(part, TextPart):
            return part.text
        data = group.blobs.get(part.content_hash)
        if data is None:
            return SampleImage(part.content_hash, None, "its bytes are not in the journal")
        return SampleImage(part.content_hash, bytes(data))

    return tuple(ShownMessage(message.role, tuple(map(shown, message.content))) for message in messages)


def _with_calls(message: Mapping[str, Any]) -> dict[str, str]:
    """Role and text of a prompt's message, calls of tools below its text."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    return {"role": message["role"], "content": "\n".join(filter(None, (message["content"], *calls)))}


def _open(file: Path) -> sqlite3.Connection | None:
    """Open the index; None if the learner has not made its tables yet."""
    if not is_there(file):
        return None
    db = sqlite3.connect(read_only_uri(file), uri=True, isolation_level=None, check_same_thread=False)
    (schema,) = db.execute("PRAGMA user_version").fetchone()
    if schema not in (0, SCHEMA):
        raise sqlite3.DatabaseError(f"it has schema {schema}, and this version of asyncrl reads schema {SCHEMA}")
    return db if schema else None
