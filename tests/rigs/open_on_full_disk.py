"""Open the learner's databases on a disk that has more and more room: `python -m tests.open_on_full_disk DISK`.

A line of JSON for each: what was opened, with which room, and what kind of failure it was.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np

from asyncrl.journal.sample_index import SampleIndex, TrainedBatch
from asyncrl.journal.writer import JOURNAL_FILE, Journal
from asyncrl.run_folder.failure import kind_of

KIB = 1024
NOTHING = TrainedBatch(np.zeros(0, np.float32), np.zeros(0, np.float32), np.zeros(0, bool))


def leave(disk: Path, room: int) -> None:
    """So many bytes free."""
    (disk / "room").write_bytes(bytes(room))
    with suppress(OSError), (disk / "filled").open("wb", buffering=0) as file:
        while file.write(bytes(4 * KIB)):
            pass
    (disk / "room").unlink()


def open_journal(run: Path) -> None:
    Journal(run / JOURNAL_FILE).close()


def open_index(run: Path) -> None:
    with closing(SampleIndex(run)) as index:
        index.write(1, 0, [], NOTHING)


def kind_at(opening: Callable[[Path], None], run: Path) -> str:
    try:
        opening(run)
    except Exception as error:
        return kind_of(error) or f"crash: {error!r}"
    return "opened"


if __name__ == "__main__":
    disk = Path(sys.argv[1])
    for begins in (True, False):
        for room in range(0, 128 * KIB, 4 * KIB):
            for place, opening in (("journal", open_journal), ("index", open_index)):
                run = disk / "run"
                run.mkdir()
                if not begins:
                    opening(run)
                leave(disk, room)
                print(json.dumps({"begins": begins, "place": place, "room": room, "kind": kind_at(opening, run)}))
                shutil.rmtree(run)
                (disk / "filled").unlink()
