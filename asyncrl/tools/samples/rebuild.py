"""Add to the index what the journal holds and it lacks: it was missing or damaged, or lacks some steps."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from asyncrl.errors import RunTakenError, UserError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.reader import JournalReader
from asyncrl.journal.sample_index import INDEX_FILE, insert_group, open_index
from asyncrl.run_folder.lock import LAUNCHER_LOCK, LEARNER_LOCK, holding, refuse_busy
from asyncrl.tools.samples.sources import RunRows, TokenTexts, prompt_of_row, prompt_of_tokens, read_run_config

_GROUPS_PER_TRANSACTION = 256


def rebuild_index(run_dir: Path) -> int:
    """Index the kept groups that were trained and are not in the index; returns their number.

    Advantages and the learner's log-probs, which only a step knows, stay unknown. Raises UserError while a learner
    works on the run, and where nothing can be written.
    """
    file, index = run_dir / JOURNAL_FILE, run_dir / INDEX_FILE
    if not file.is_file():
        raise UserError(f"there is no run in {run_dir}: it has no {JOURNAL_FILE}")
    with ExitStack() as resources:
        with _explaining_failed_writes(index):
            refuse_busy(run_dir, LAUNCHER_LOCK)  # the launcher may be about to start its learner again
            resources.enter_context(holding(run_dir, LEARNER_LOCK))
        journal = resources.enter_context(closing(JournalReader(file)))
        with _explaining_failed_writes(index):
            db = resources.enter_context(closing(open_index(index)))
        config = read_run_config(run_dir)
        texts, rows = TokenTexts(run_dir, config), RunRows(run_dir, config)
        indexed = {ticket_id for (ticket_id,) in db.execute("SELECT ticket_id FROM groups")}
        missing = [
            (rows.row_at(slot.position) or 0, slot, step)
            for ticket_id, (slot, step) in journal.kept_after(0).items()
            if step is not None and ticket_id not in indexed
        ]
        missing.sort(key=lambda item: item[0])  # neighbours in the data file are read together
        added = 0
        for start in range(0, len(missing), _GROUPS_PER_TRANSACTION):
            groups = [
                (group, prompt_of_row(group, texts, rows, slot.position) or prompt_of_tokens(group, texts), step)
                for _, slot, step in missing[start : start + _GROUPS_PER_TRANSACTION]
                if (group := journal.find_group(slot.ticket_id)) is not None
            ]
            with _explaining_failed_writes(index), db:
                db.execute("BEGIN")
                for group, prompt, step in groups:
                    insert_group(db, group, prompt, step=step, version=step - 1)
            added += len(groups)
        return added


@contextmanager
def _explaining_failed_writes(index: Path) -> Iterator[None]:
    """Raise UserError with the reason and the way out where the index cannot be written."""
    try:
        yield
    except RunTakenError:
        raise
    except (OSError, UserError, sqlite3.OperationalError) as error:
        # A lock's own message ends in a fix that does not help here: the reason is the error beneath it.
        problem = error.__context__ if isinstance(error, UserError) else error
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise UserError(
            f"nothing can be written in {index.parent} ({reason}): the index would be {index}. Copy the run directory "
            "to where there is room and you may write, and --reindex there"
        ) from None
