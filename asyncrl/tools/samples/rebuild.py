"""Make an index of what the journal holds: where there was none, or it was damaged, or it lacks some steps."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from asyncrl.errors import RunTakenError, UserError
from asyncrl.journal.reader import JournalReader
from asyncrl.journal.sample_index import open_index
from asyncrl.journal.sample_rows import IndexedGroup, index_group
from asyncrl.journal.sample_tables import INDEX_FILE, insert_groups
from asyncrl.journal.writer import JOURNAL_FILE
from asyncrl.run_folder.full_disk import find_no_room
from asyncrl.run_folder.lock import LAUNCHER_LOCK, LEARNER_LOCK, holding, refuse_busy
from asyncrl.tools.samples.dataset import RunRows
from asyncrl.tools.samples.journaled import prompt_of_row, prompt_of_tokens
from asyncrl.tools.samples.store import read_run_config
from asyncrl.tools.samples.texts import TokenTexts

_TOGETHER = 256
"""Groups of one transaction."""


def rebuild_index(run_dir: Path) -> int:
    """Add the kept groups that were trained and are not in it; returns how many. What only a step knows (advantages,
    the learner's log-probs) stays unknown. Raises UserError while a learner works on the run, and where
    nothing can be written.
    """
    file = run_dir / JOURNAL_FILE
    if not file.is_file():
        raise UserError(f"there is no run in {run_dir}: it has no {JOURNAL_FILE}")
    index = run_dir / INDEX_FILE
    with ExitStack() as resources:
        with _writing(index):
            refuse_busy(run_dir, LAUNCHER_LOCK)  # its learner may be about to come back
            resources.enter_context(holding(run_dir, LEARNER_LOCK))
        with closing(JournalReader(file)) as journal, closing(_open(index)) as db:
            config = read_run_config(run_dir)
            texts, rows = TokenTexts(run_dir, config), RunRows(run_dir, config)
            there = {ticket_id for (ticket_id,) in db.execute("SELECT ticket_id FROM groups")}
            missing = [
                (rows.row_at(slot.position) or 0, slot, step)
                for ticket_id, (slot, step) in journal.kept_after(0).items()
                if step is not None and ticket_id not in there
            ]
            missing.sort(key=lambda item: item[0])  # neighbours in the data file are read together
            added = 0
            for start in range(0, len(missing), _TOGETHER):
                groups: list[IndexedGroup] = []
                for _, slot, step in missing[start : start + _TOGETHER]:
                    group = journal.find_group(slot.ticket_id)
                    if group is not None and step is not None:
                        prompt = prompt_of_row(group, texts, rows, slot.position) or prompt_of_tokens(group, texts)
                        groups.append(index_group(group, prompt, step=step, version=step - 1))
                with _writing(index), db:
                    db.execute("BEGIN")
                    insert_groups(db, groups)
                added += len(groups)
            return added


def _open(index: Path) -> sqlite3.Connection:
    with _writing(index):
        return open_index(index)


@contextmanager
def _writing(index: Path) -> Iterator[None]:
    """What keeps it from being written is raised as UserError, with the way out."""
    try:
        yield
    except RunTakenError:
        raise
    except (OSError, UserError, sqlite3.OperationalError) as error:
        # The lock's own words end in a fix that is none here: why it could not be had is the error beneath.
        problem = find_no_room(error, index) or (error.__context__ if isinstance(error, UserError) else error)
        said = problem.strerror if isinstance(problem, OSError) else problem
        raise UserError(
            f"nothing can be written in {index.parent} ({said}): the index would be {index}. Copy the run directory "
            "to where there is room and you may write, and --reindex there"
        ) from None
