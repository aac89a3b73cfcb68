"""Account of a run's samples and its learning curve, as its journal and its metrics have them."""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.database import DROPPED, JournalReader, explain_errors, read_only_uri
from asyncrl.telemetry.jsonl import JsonlTail
from asyncrl.telemetry.recorder import EVALUATIONS_FILE, METRICS_FILE, is_finished

Record = Mapping[str, Any]
STATUS = "rows/"
"""First part of the metrics that count a step's trajectories by status."""


@dataclass(frozen=True)
class Account:
    """Training groups of a whole run."""

    issued: int
    trained: int
    dropped: Mapping[str, int]
    """Dropped groups by reason."""
    unfinished: int
    """Groups that were issued, and neither trained nor dropped."""

    @property
    def residual(self) -> int:
        """0 where each group is in one state; anything else is a lost or doubled group."""
        return self.issued - self.trained - sum(self.dropped.values()) - self.unfinished


def open_journal(run: Path) -> closing[JournalReader]:
    """The journal, to read. Raises BadStateError for a damaged one."""
    return closing(JournalReader(run / JOURNAL_FILE, untouched=is_finished(run)))


def read_account(run: Path) -> Account:
    """Counters of the journal, and its unfinished tickets. Nothing is changed. Raises BadStateError for a damaged
    one."""
    journal = run / JOURNAL_FILE
    address = read_only_uri(journal, untouched=is_finished(run))
    with explain_errors("reading", journal), closing(sqlite3.connect(address, uri=True, isolation_level=None)) as db:
        db.execute("BEGIN")  # one state of the file for both
        counters = dict(db.execute("SELECT name, count FROM ledger"))
        ((unfinished,),) = db.execute("SELECT COUNT(*) FROM tickets")
    dropped = {name.removeprefix(DROPPED): count for name, count in counters.items() if name.startswith(DROPPED)}
    return Account(
        issued=counters.get("issued", 0),
        trained=counters.get("trained", 0),
        dropped={reason: count for reason, count in dropped.items() if count},
        unfinished=unfinished,
    )


@dataclass(frozen=True)
class History:
    """Lines of metrics.jsonl and evaluations.jsonl up to a step, in their order."""

    steps: Sequence[Record]
    evaluations: Sequence[Record]

    def trajectories(self) -> dict[str, int]:
        """Trajectories of all steps by status; those that never occurred are left out."""
        counts = Counter[str]()
        for step in self.steps:
            counts.update({name: int(value) for name, value in step.items() if name.startswith(STATUS)})
        return {name.removeprefix(STATUS): count for name, count in counts.items() if count}

    def largest(self, name: str) -> float | None:
        """Largest magnitude of a metric over all steps; None where no step has it."""
        found = [abs(value) for step in self.steps if (value := number(step.get(name))) is not None]
        return max(found, default=None)

    def mean(self, name: str, after: int, last: int) -> float | None:
        """Mean of a metric over the steps `after` < step <= `last`; None where none has it."""
        found = [value for s in self.steps if after < s["step"] <= last and (value := number(s.get(name))) is not None]
        return sum(found) / len(found) if found else None

    def points(self, most: int) -> list[int]:
        """Steps for a table, at most so many: those of evaluations, or else of metrics, with the first and the last."""
        there = sorted({line["step"] for line in self.evaluations or self.steps})
        if len(there) <= most:
            return there
        return [there[round(i * (len(there) - 1) / (most - 1))] for i in range(most)]


def read_history(run: Path, last_step: int | None) -> History:
    """`last_step`: of the exported checkpoint; None takes all."""

    def lines(name: str) -> list[Record]:
        found = [line for line in JsonlTail(run / name).new_records()[0] if isinstance(line.get("step"), int)]
        return [line for line in found if last_step is None or line["step"] <= last_step]

    return History(lines(METRICS_FILE), lines(EVALUATIONS_FILE))


def number(value: Any) -> float | None:
    """The value where it is a finite number."""
    is_one = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_one else None
