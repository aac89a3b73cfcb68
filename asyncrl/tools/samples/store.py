"""Look at a run's samples, while it trains or after it. Loads no torch; reads only.

Lists come from the index (`samples.sqlite`), a group in full from the journal, as long as it is kept. What the journal
holds and the index does not (groups that wait to be trained, an index that is missing or damaged) is indexed in memory.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from asyncrl.errors import UserError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.reader import JournalReader, read_only_uri
from asyncrl.journal.sample_index import (
    INDEX_FILE,
    SCHEMA,
    TABLES,
    PromptText,
    insert_group,
    read_trained_tokens,
    remove_groups,
)
from asyncrl.telemetry.reading import is_there
from asyncrl.tools.samples import query as queries
from asyncrl.tools.samples.model import Page, SampleDetail, SampleQuery, SampleRow, TrajectoryDetail
from asyncrl.tools.samples.sources import RunRows, TokenTexts, prompt_of_row, prompt_of_tokens, read_run_config
from protocol.messages import Group

T = TypeVar("T")

MOST_IN_MEMORY = 500
"""Groups that are indexed in memory; `asyncrl inspect RUN --reindex` adds more to the file."""
BEGINNING = 64
"""Tokens of a completion that a list shows."""
FRESH, WRITTEN = "main", "written"
"""Schema names of the database in memory and of the attached index."""
NOT_KEPT = (
    "its tokens are not kept any more: the newest trainer.keep_samples_gib of groups are, beside those that a restart "
    "needs"
)
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
        self._lock = threading.RLock()
        self._journal = JournalReader(journal)
        self._texts = TokenTexts(self.run_dir, config)
        self._rows = RunRows(self.run_dir, config)
        self._db = sqlite3.connect(":memory:", uri=True, isolation_level=None, check_same_thread=False)
        self._db.executescript(TABLES)
        self._index = self.run_dir / INDEX_FILE
        self._attached: tuple[int, int] | None = None
        """Device and inode of the index that is attached."""
        self._problem = ""
        """Why the index cannot be read."""
        self._refused = 0
        """Modification time, in nanoseconds, of the index that cannot be read."""
        self._left_out = 0
        """Number of groups that neither the index nor the memory has."""
        self._seen: tuple[int, ...] = ()
        """State of journal and index when the memory was last brought up to date."""
        self._fresh: dict[int, int | None] = {}
        """Steps of the groups in memory, by ticket."""

    def find(self, query: SampleQuery, *, limit: int = 50, offset: int = 0) -> Page:
        """Return a page of the samples that match, and their number."""
        return self._with_index(lambda: self._find(query, limit, offset))

    def detail(self, ticket_id: int) -> SampleDetail:
        """Return a group in full. Raises UserError where no such ticket was trained or waits to be."""
        return self._with_index(lambda: self._detail(ticket_id))

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences for the user about the index, as the last `find` or `detail` saw it."""
        notices = [self._problem] if self._problem else []
        if self._left_out:
            notices.append(
                f"{self._left_out} older groups of the journal are not in {self._index}, and are not shown. To add "
                f"them: asyncrl inspect {self.run_dir} --reindex"
            )
        return tuple(notices)

    def close(self) -> None:
        with self._lock:
            self._db.close()
            self._journal.close()

    # --- reading ----------------------------------------------------------------------------------------

    def _with_index(self, read: Callable[[], T]) -> T:
        """Read with the index, and without it if it turns out to be damaged."""
        with self._lock:
            try:
                self._refresh()
                return read()
            except sqlite3.DatabaseError as problem:
                is_mistake = getattr(problem, "sqlite_errorcode", sqlite3.SQLITE_ERROR) == sqlite3.SQLITE_ERROR
                if not self._attached or is_mistake:
                    raise
                self._give_up_index(problem)
            self._refresh()
            return read()

    def _find(self, query: SampleQuery, limit: int, offset: int) -> Page:
        sources = (FRESH, WRITTEN) if self._attached else (FRESH,)
        keys = queries.find(self._db, sources, query, limit, offset)
        total = queries.count(self._db, sources, query)
        groups = {
            ticket_id: self._rows_of(source, ticket_id) for source, ticket_id in dict.fromkeys(key[:2] for key in keys)
        }
        return Page(tuple(groups[ticket_id][number] for _, ticket_id, number in keys), total)

    def _rows_of(self, source: str, ticket_id: int) -> tuple[SampleRow, ...]:
        """Read the rows of a group, with the first words of each completion."""
        group = self._journal.find_group(ticket_id)
        rows = queries.read_group(self._db, source, ticket_id, has_payload=group is not None)
        if group is None:
            return rows
        starts = np.cumsum(group.lengths) - group.lengths
        firsts = [slice(s, s + min(n, BEGINNING)) for s, n in zip(starts, group.lengths, strict=True)]
        texts = [self._texts.plain(group.token_ids[first]) for first in firsts]
        return tuple(replace(row, completion=text) for row, text in zip(rows, texts, strict=True))

    def _detail(self, ticket_id: int) -> SampleDetail:
        group = self._journal.find_group(ticket_id)
        source = FRESH if ticket_id in self._fresh else WRITTEN
        rows = ()
        if source == FRESH or self._attached:
            rows = queries.read_group(self._db, source, ticket_id, has_payload=group is not None)
        if not rows:
            raise UserError(f"{self.run_dir} has no sample of ticket {ticket_id}")
        *row, server_id = self._db.execute(
            f"SELECT row_id, messages, answer, media, server_id FROM {source}.groups JOIN {source}.prompts "
            "USING (prompt_id) WHERE ticket_id = ?",
            (ticket_id,),
        ).fetchone()
        prompt = PromptText.from_row(*row)
        problem, lost = self._texts.problem, None
        if group is None:
            trajectories = tuple(TrajectoryDetail(row) for row in rows)
            lost = self._journal.lost_in(ticket_id)
            state = "cut off or damaged" if lost and lost.exists() else "missing"
            problem = DAMAGED.format(lost, state) if lost else NOT_KEPT
        else:
            trajectories = self._trajectories(source, rows, group)
            slot = self._journal.slot(ticket_id)
            if not prompt.row_id and slot is not None:
                prompt = prompt_of_row(group, self._texts, self._rows, slot.position) or prompt
        return SampleDetail(
            ticket_id=ticket_id,
            server_id=server_id,
            row_id=prompt.row_id,
            messages=prompt.messages,
            images=self._rows.images(prompt),
            answer=prompt.answer,
            trajectories=trajectories,
            problem=problem,
            is_damaged=lost is not None,
        )

    def _trajectories(self, source: str, rows: Sequence[SampleRow], group: Group) -> tuple[TrajectoryDetail, ...]:
        learner, masked = read_trained_tokens(self._db, source, group)
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
                loss_mask=group.loss_mask[part],
                masked=masked[part],
            )
            for row, record, part in zip(rows, group.trajectories, parts, strict=True)
        )

    # --- what the index does not have -------------------------------------------------------------------

    def _refresh(self) -> None:
        """Follow what the learner has written since the last call."""
        self._attach()
        changes = self._db.execute(f"PRAGMA {WRITTEN}.data_version").fetchone()[0] if self._attached else 0
        seen = (self._journal.changes, *(self._attached or ()), changes)
        if seen == self._seen:
            return
        last = 0
        if self._attached:
            last = self._db.execute(f"SELECT COALESCE(MAX(step), 0) FROM {WRITTEN}.groups").fetchone()[0]
        wanted = self._journal.kept_after(last)
        newest = sorted(wanted, reverse=True)[:MOST_IN_MEMORY]
        self._left_out = len(wanted) - len(newest)
        version = self._journal.last_step()
        for ticket_id in [i for i, step in self._fresh.items() if i not in wanted or wanted[i][1] != step]:
            remove_groups(self._db, "ticket_id = ?", (ticket_id,))
            del self._fresh[ticket_id]
        for ticket_id in (i for i in newest if i not in self._fresh):
            step = wanted[ticket_id][1]
            group = self._journal.find_group(ticket_id)
            if group is not None:
                # The prompt's text is decoded from its tokens: rows of the data set would cost time.
                prompt = prompt_of_tokens(group, self._texts)
                insert_group(self._db, group, prompt, step=step, version=version if step is None else step - 1)
                self._fresh[ticket_id] = step
        self._seen = seen

    def _attach(self) -> None:
        """Attach the index as it is now: the file may appear late, and be replaced."""
        try:
            status = self._index.stat()
        except FileNotFoundError:
            file, written = None, 0
        else:
            file, written = (status.st_dev, status.st_ino), status.st_mtime_ns
        if file == self._attached or (file and written == self._refused):
            return
        self._detach()
        self._problem = ""
        if file is None:
            return
        try:
            self._db.execute(f"ATTACH ? AS {WRITTEN}", (read_only_uri(self._index),))
            self._attached = file
            (schema,) = self._db.execute(f"PRAGMA {WRITTEN}.user_version").fetchone()
        except sqlite3.DatabaseError as problem:
            self._give_up_index(problem)
            return
        if schema != SCHEMA:
            self._give_up_index(f"it has schema {schema}, and this version of asyncrl reads schema {SCHEMA}")

    def _give_up_index(self, problem: object) -> None:
        self._detach()
        self._refused = self._index.stat().st_mtime_ns
        self._problem = (
            f"What the journal holds is shown: {self._index} cannot be read: {problem}. To make it anew: asyncrl "
            f"inspect {self.run_dir} --reindex"
        )
        self._seen = ()

    def _detach(self) -> None:
        if WRITTEN in {name for _, name, _ in self._db.execute("PRAGMA database_list")}:
            self._db.execute(f"DETACH {WRITTEN}")
        self._attached = None
