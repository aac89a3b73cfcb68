"""Cost of the journal per group: 8 completions of 2,048 tokens, for both durabilities.

    python benchmarks/journal_cost.py [--groups 128] [--repeats 5] [--folder DIR]

`keep` is the ledger's `receive`: verified groups are packed, inserted and committed, one or eight together, durable to
the degree of `trainer.durability` when it returns. `flush` copies the write-ahead log into the file and waits for the
disk, as before each checkpoint. `take` is a step's batch, `forget` the removal of groups that a checkpoint made
superfluous. Medians; the cases take turns. `--folder` should lie on the disk that runs would use.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from group_traffic import KINDS, group, prepared

from asyncrl.config.run_sections import Durability
from asyncrl.journal.writer import Journal
from learner.groups.ticket import ReceivedGroup
from learner.tickets.ledger import TicketLedger
from protocol.codec import Limits, decode, encode
from protocol.messages import Group

DURABILITIES: tuple[Durability, ...] = ("process", "power")


def journal_costs(folder: Path, durability: Durability, together: int, groups: int) -> dict[str, float]:
    """Milliseconds per group of the ledger's `receive`, of taking and of forgetting, and bytes per group on disk."""
    folder.mkdir()
    journal = Journal(folder / "journal.sqlite", durability)
    ledger = TicketLedger(journal, prompts_per_step=groups, bound=1, total_groups=groups)
    items = [prepared(slot) for slot in ledger.admissible(0)]
    ledger.issue(items)
    frames = [[bytes(frame) for frame in encode(group(n % KINDS, ticket_id=n))] for n in range(groups)]
    received = [
        ReceivedGroup(item, decode(each, (Group,), Limits()), each)  # type: ignore[arg-type]
        for item, each in zip(items, frames, strict=True)
    ]
    costs = {}

    def timed(name: str, action: Callable[[], object]) -> None:
        started = time.perf_counter()
        action()
        costs[name] = costs.get(name, 0.0) + 1000 * (time.perf_counter() - started) / groups

    for start in range(0, groups, together):
        timed("keep", lambda: ledger.receive(received[start : start + together]))  # noqa: B023
    timed("flush", ledger.flush_journal)
    costs["bytes"] = journal.file_bytes / groups
    timed("take", ledger.take)
    timed("forget", lambda: ledger.forget_payloads(1))
    journal.close()
    return costs


def journal_table(folder: Path, groups: int, repeats: int) -> None:
    print("| durability | groups per commit | keep ms | flush ms | take ms | forget ms | kB on disk |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    cases = [(durability, together) for durability in DURABILITIES for together in (1, 8)]
    found: dict[tuple[Durability, int], list[dict[str, float]]] = {case: [] for case in cases}
    for repeat in range(repeats):
        for durability, together in cases:
            place = folder / f"{durability}-{together}-{repeat}"
            found[durability, together].append(journal_costs(place, durability, together, groups))
    for (durability, together), costs in found.items():
        middle = {name: median(c[name] for c in costs) for name in costs[0]}
        row = " | ".join(f"{middle[name]:.2f}" for name in ("keep", "flush", "take", "forget"))
        print(f"| {durability} | {together} | {row} | {middle['bytes'] / 1000:.0f} |")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=128, help="per repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where the journals are written (and removed)")
    options = parser.parse_args()
    wire_kb = sum(len(frame) for frame in encode(group(0))) / 1000
    print(
        f"Groups of {wire_kb:.0f} kB on the wire; {options.repeats} repeats of {options.groups}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, SQLite {sqlite3.sqlite_version}\n"
    )
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="asyncrl-bench-") as name:
        journal_table(Path(name), options.groups, options.repeats)


if __name__ == "__main__":
    main()
