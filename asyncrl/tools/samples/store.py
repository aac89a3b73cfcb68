"""Look at a run's samples, while it trains or after it. Loads no torch; reads only.

Lists come from the index (`samples.sqlite`), a sample itself from the journal, as long as its group is kept. What the
journal holds and the index does not (groups that wait to be trained, an index that is missing or damaged) is indexed
in memory.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from asyncrl.errors import UserError
from asyncrl.journal.reader import JournalReader, read_only_uri
from asyncrl.journal.sample_tables import INDEX_FILE, SCHEMA, TABLES, insert_groups, remove_groups
from asyncrl.journal.writer import JOURNAL_FILE
from asyncrl.run_folder.full_disk import describe_full_disk, find_no_room
from asyncrl.telemetry.reading import is_there
from asyncrl.telemetry.recorder import CONFIG_FILE
from asyncrl.tools.samples import query as queries
from asyncrl.tools.samples.dataset import RunRows
from asyncrl.tools.samples.details import DAMAGED, NOT_KEPT, read_prompt, read_trained_tokens, trajectory_details
from asyncrl.tools.samples.images import SampleImages
from asyncrl.tools.samples.journaled import index_journaled, prompt_of_row
from asyncrl.tools.samples.model import Page, SampleDetail, SampleQuery, SampleRow
from asyncrl.tools.samples.texts import TokenTexts

MOST_IN_MEMORY = 500
"""Groups that are indexed for one who looks; more are for `asyncrl inspect RUN --reindex`."""
BEGINNING = 64
"""Tokens of a completion that a list shows."""
FRESH, WRITTEN = "main", "written"
"""Names of the database in memory and of the index."""


class SampleStore:
    """Thread-safe."""

    def __init__(self, run_dir: Path):
        """Raises UserError where there is no run, or it cannot be read."""
        self.run_dir = Path(run_dir)
        journal = self.run_dir / JOURNAL_FILE
        if not is_there(journal):
            raise UserError(f"there is no run in {self.run_dir}: it has no {JOURNAL_FILE}")
        config = read_run_config(self.run_dir)
        self._lock = threading.RLock()
        self._journal = JournalReader(journal)
        self.texts = TokenTexts(self.run_dir, config)
        self._rows = RunRows(self.run_dir, config)
        self._images = SampleImages(self.run_dir, self._rows)
        self._db = sqlite3.connect(":memory:", uri=True, isolation_level=None, check_same_thread=False)
        self._db.executescript(TABLES)
        self._index = self.run_dir / INDEX_FILE
        self._attached: tuple[int, int] | None = None
        """Device and inode of the file that is."""
        self._problem = ""
        """What is wrong with the index."""
        self._refused = 0
        """When the file that this is said of was written, in nanoseconds."""
        self._left_out = 0
        """Groups that neither the index nor the memory has."""
        self._seen: tuple[int, ...] = ()
        self._fresh: dict[int, int | None] = {}
        """Steps of the groups in memory, by ticket."""

    # --- lists ----------------------------------------------------------------------------------------

    def find(self, query: SampleQuery, *, limit: int = 50, offset: int = 0) -> Page:
        """A page of the samples that fit, and how many there are."""
        with self._lock:
            try:
                return self._find(query, limit, offset)
            except sqlite3.DatabaseError as problem:
                if not self._attached or not _is_of_the_file(problem):
                    raise
                self._give_up_index(problem)
                return self._find(query, limit, offset)

    def _find(self, query: SampleQuery, limit: int, offset: int) -> Page:
        self._refresh()
        keys = queries.find(self._db, self._sources, query, limit, offset)
        total = queries.count(self._db, self._sources, query)
        kept = self._journal.kept({ticket_id for _, ticket_id, _ in keys})
        rows = [queries.read_row(self._db, *key, has_payload=key[1] in kept) for key in keys]
        return Page(tuple(rows), total)

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know about the index: of the last `find` or `detail`."""
        notices = [self._problem] if self._problem else []
        if self._left_out:
            if not self._attached and not self._problem:
                notices.append(f"there is no {self._index}")
            notices.append(
                f"{self._left_out} older groups of the journal are not in {self._index}, and are not shown. To add "
                f"them: asyncrl inspect {self.run_dir} --reindex"
            )
        if self._is_of_old and not self._problem:
            notices.append(
                f"{self._journal.path} keeps no group of the {self._journal.last_step()} steps, and no index lists "
                f"them: the run was made before samples were kept. Some are in {self.run_dir / 'samples.jsonl'}"
            )
        return tuple(notices)

    @property
    def _is_of_old(self) -> bool:
        """Steps were made, and nothing is known of their samples."""
        if self._fresh or not self._journal.last_step():
            return False
        return (
            not self._attached or not self._db.execute(f"SELECT EXISTS (SELECT 1 FROM {WRITTEN}.groups)").fetchone()[0]
        )

    @property
    def _sources(self) -> tuple[str, ...]:
        return (FRESH, WRITTEN) if self._attached else (FRESH,)

    # --- one sample -------------------------------------------------------------------------------------

    def detail(self, ticket_id: int) -> SampleDetail:
        """The whole group. Raises UserError where no such ticket was trained or waits to be."""
        with self._lock:
            try:
                return self._detail(ticket_id)
            except sqlite3.DatabaseError as problem:
                if not self._attached or not _is_of_the_file(problem):
                    raise
                self._give_up_index(problem)
                return self._detail(ticket_id)

    def _detail(self, ticket_id: int) -> SampleDetail:
        self._refresh()
        source = FRESH if ticket_id in self._fresh else WRITTEN if self._attached else ""
        size = (
            source
            and self._db.execute(
                f"SELECT COUNT(*) FROM {source}.trajectories JOIN {source}.groups USING (step, ticket_id) "
                "WHERE ticket_id = ?",
                (ticket_id,),
            ).fetchone()[0]
        )
        if not size:
            raise UserError(f"{self.run_dir} has no sample of ticket {ticket_id}")
        group = self._journal.find_group(ticket_id)
        rows = tuple(
            queries.read_row(self._db, source, ticket_id, number, has_payload=group is not None)
            for number in range(size)
        )
        prompt, server_id = read_prompt(self._db, source, ticket_id)
        tokens = None
        if group is not None:
            tokens = read_trained_tokens(self._db, source, group)
            slot = self._journal.slot(ticket_id)
            if not prompt.row_id and slot is not None:
                prompt = prompt_of_row(group, self.texts, self._rows, slot.position) or prompt
        problem, lost = self.texts.problem, None
        if group is None:
            lost = self._journal.lost_in(ticket_id)
            how = "cut off or damaged" if lost and lost.exists() else "missing"
            problem = DAMAGED.format(lost, how) if lost else NOT_KEPT
        return SampleDetail(
            ticket_id=ticket_id,
            step=rows[0].step,
            server_id=server_id,
            row_id=prompt.row_id,
            prompt=prompt.messages[-1]["content"],
            messages=prompt.messages,
            images=self._images.of(prompt),
            answer=prompt.answer,
            rows=rows,
            trajectories=trajectory_details(rows, group, tokens, self.texts),
            problem=problem,
            is_damaged=lost is not None,
        )

    def beginnings(self, rows: Sequence[SampleRow]) -> tuple[str, ...]:
        """The first words of each completion; empty where its tokens are not kept."""
        found: dict[tuple[int, int], str] = {}
        with self._lock:
            for ticket_id in dict.fromkeys(row.ticket_id for row in rows if row.has_payload):
                group = self._journal.find_group(ticket_id)
                if group is None:
                    continue
                starts = np.cumsum(group.lengths) - group.lengths
                for number in (row.trajectory for row in rows if row.ticket_id == ticket_id):
                    first, length = int(starts[number]), min(int(group.lengths[number]), BEGINNING)
                    found[ticket_id, number] = self.texts.plain(group.token_ids[first : first + length])
        return tuple(found.get((row.ticket_id, row.trajectory), "") for row in rows)

    # --- what the index does not have -------------------------------------------------------------------

    def _refresh(self) -> None:
        """Follow what the learner has written since."""
        self._attach()
        seen = (self._journal.changes, *(self._attached or ()), self._changes())
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
            slot, step = wanted[ticket_id]
            at = version if step is None else step - 1
            indexed = index_journaled(self._journal, self.texts, slot, step, at)
            if indexed is not None:
                insert_groups(self._db, [indexed])
                self._fresh[ticket_id] = step
        self._seen = seen

    def _changes(self) -> int:
        return self._db.execute(f"PRAGMA {WRITTEN}.data_version").fetchone()[0] if self._attached else 0

    def _attach(self) -> None:
        """The index, as it is now: it may come late, and be replaced."""
        try:
            status = self._index.stat()
        except FileNotFoundError:
            found, written = None, 0
        else:
            found, written = (status.st_dev, status.st_ino), status.st_mtime_ns
        if found == self._attached or (found and written == self._refused):
            return
        self._detach()
        self._problem = ""
        if found is None:
            return
        try:
            self._db.execute(f"ATTACH ? AS {WRITTEN}", (read_only_uri(self._index),))
            self._attached = found
            (schema,) = self._db.execute(f"PRAGMA {WRITTEN}.user_version").fetchone()
        except sqlite3.DatabaseError as problem:
            self._give_up_index(problem)
            return
        if schema != SCHEMA:
            self._give_up_index(f"it has schema {schema}, and this version of asyncrl reads schema {SCHEMA}")

    def _give_up_index(self, problem: object) -> None:
        self._detach()
        self._refused = self._index.stat().st_mtime_ns
        reason = f"{problem}. To make it anew: asyncrl inspect {self.run_dir} --reindex"
        if isinstance(problem, sqlite3.Error) and (full := find_no_room(problem, self._index)):
            reason = describe_full_disk(full, self.run_dir, then="look again")
        self._problem = f"What the journal holds is shown: {self._index} cannot be read: {reason}"
        self._seen = ()

    def _detach(self) -> None:
        attached = {name for _, name, _ in self._db.execute("PRAGMA database_list")}
        if WRITTEN in attached:
            self._db.execute(f"DETACH {WRITTEN}")
        self._attached = None

    def close(self) -> None:
        with self._lock:
            self._db.close()
            self._journal.close()


def read_run_config(run_dir: Path) -> dict[str, Any]:
    """The run's own, unchecked: it may be of another version. Empty where there is none. UserError for other files."""
    file = run_dir / CONFIG_FILE
    if not is_there(file):
        return {}
    fix = "Restore it, or move it away: without it tokens may be numbers, and images missing"
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as problem:
        raise UserError(f"cannot read {file}: {' '.join(str(problem).split())}. {fix}") from None
    sections = ("model", "data", "trainer")
    if not isinstance(config, dict) or not all(isinstance(config.get(section), dict) for section in sections):
        raise UserError(f"{file} is no configuration of a run: it has not {', '.join(sections)}. {fix}")
    return config


def _is_of_the_file(problem: sqlite3.DatabaseError) -> bool:
    """And no mistake in a statement."""
    return getattr(problem, "sqlite_errorcode", sqlite3.SQLITE_ERROR) != sqlite3.SQLITE_ERROR
