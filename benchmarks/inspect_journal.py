"""How fast a run's samples can be looked at when its journal is large, and what the index costs the learner.

    python benchmarks/inspect_journal.py [--gib 10] [--repeats 5] [--folder DIR]

A run is made up in a temporary folder: groups of 8 completions of up to 2,048 tokens in the real journal, written as
fast as it goes, and the index beside it. Then a fresh process looks at it as `asyncrl inspect` does. *Cold*: the files
were dropped from the page cache before. Medians. `--folder` needs half as much room again as `--gib`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from group_traffic import BANNED, GROUP_SIZE, KINDS, TOKENS, group, measured, prepared

from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.database import TicketSlot
from asyncrl.journal.writer import Journal
from asyncrl_plugins.viewer.samples.model import Order, Page, SampleQuery
from asyncrl_plugins.viewer.samples.sample_index import SampleIndex
from asyncrl_plugins.viewer.samples.store import SampleStore
from learner.groups.ticket import PreparedTicket, ReceivedGroup
from learner.training.batch import TrainedBatch
from protocol.codec import encode
from protocol.messages import FinishReason, Group, TextPart, TrajectoryRecord, TrajectoryStatus, Turn

GIB = 1 << 30
PER_STEP = 32
PROMPTS = 20_000
ROOT = Path(__file__).parent.parent


class MadeUpRun:
    """Groups of unequal lengths, rewards, endings and ages."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._random = np.random.default_rng(0)
        self._columns = [group(kind) for kind in range(KINDS)]
        self.index_ms: list[float] = []
        """Per step."""
        write_tokenizer(folder / "export")

    def write(self, nbytes: int) -> int:
        """Whole steps until the journal has so many bytes. Returns their number."""
        journal, index = Journal(self.folder / JOURNAL_FILE), SampleIndex(self.folder)
        step = 0
        with closing(journal), closing(index):
            while journal.payload_bytes < nbytes:
                step += 1
                self._step(journal, index, step)
        return step

    def _step(self, journal: Journal, index: SampleIndex, step: int) -> None:
        first = (step - 1) * PER_STEP
        slots = [TicketSlot(number, number, step - 1, 4) for number in range(first, first + PER_STEP)]
        received = [ReceivedGroup(self._ticket(slot), self._group(slot, step - 1)) for slot in slots]
        with journal.transaction():
            journal.add_tickets(slots)
            for item in received:
                journal.add_group(item.slot.ticket_id, encode(item.group))
        with journal.transaction():
            journal.consume(step, slots)
            journal.count(issued=PER_STEP, trained=PER_STEP)
        trained = self._trained(received)
        started = time.perf_counter()
        index.write(step, step - 1, [(item.ticket.prompt, item.group) for item in received], trained)
        self.index_ms.append(1000 * (time.perf_counter() - started))

    def _ticket(self, slot: TicketSlot) -> PreparedTicket:
        made = prepared(slot)
        number = int(self._random.integers(PROMPTS))
        message = made.ticket.prompt.messages[0]
        text = TextPart(text=f"Question {number}: how many of the objects are larger than the one on the left? " * 4)
        prompt = made.ticket.prompt.model_copy(
            update={
                "row_id": f"rows.parquet:{number}",
                "messages": (message.model_copy(update={"content": (message.content[0], text)}),),
            }
        )
        return replace(made, ticket=made.ticket.model_copy(update={"prompt": prompt}))

    def _group(self, slot: TicketSlot, version: int) -> Group:
        kind = slot.ticket_id % KINDS
        whole = self._columns[kind]
        lengths = np.clip(self._random.lognormal(6.8, 0.7, GROUP_SIZE), 8, TOKENS).astype(np.int32)
        total = int(lengths.sum())
        staleness = int(min(version, self._random.integers(5)))
        return whole.model_copy(
            update={
                "ticket_id": slot.ticket_id,
                "prompt_ids": measured(kind).token_ids,
                "lengths": lengths,
                "token_ids": whole.token_ids[:total],
                "source": whole.source[:total],
                "logprobs": whole.logprobs[:total],
                "versions": np.full(total, version - staleness, np.int32),
                "trajectories": tuple(self._record(int(length)) for length in lengths),
            }
        )

    def _record(self, length: int) -> TrajectoryRecord:
        turns, draw = (Turn(start=0, end=length),), self._random.random()
        if draw < 0.01:
            kind = TrajectoryStatus.ERROR
            return TrajectoryRecord(
                status=kind,
                finish_reason=FinishReason.STOP,
                error_kind="reward_timeout",
                error_message="15 s",
                turns=turns,
            )
        cut = length == TOKENS
        score = float(self._random.choice([0.0, 0.1, 1.0, 1.1]))
        return TrajectoryRecord(
            status=TrajectoryStatus.TRUNCATED if cut else TrajectoryStatus.FINISHED,
            finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
            rewards={"exact_match": float(score >= 1), "format": float(score % 1 > 0)},
            reward=score,
            turns=turns,
        )

    def _trained(self, received: list[ReceivedGroup]) -> TrainedBatch:
        logprobs = np.concatenate([item.group.logprobs for item in received])
        noise = self._random.normal(0, 0.05, len(logprobs)).astype(np.float32)
        masked = np.abs(noise) > 0.2
        return TrainedBatch(
            self._random.normal(size=PER_STEP * GROUP_SIZE).astype(np.float32), logprobs + noise, masked
        )


def write_tokenizer(folder: Path) -> None:
    """Tokenizer as large as that of a Qwen2-VL: it has to be loaded for the texts of tokens."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words, merges, longest = list(letters), [], list(letters)
    while len(words) < BANNED[0]:
        made = [(word, letter) for word in longest for letter in letters][: BANNED[0] - len(words)]
        longest = [word + letter for word, letter in made]
        words += longest
        merges += made
    model = {"type": "BPE", "vocab": {word: number for number, word in enumerate(words)}, "merges": merges}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


def look(folder: Path) -> dict[str, float]:
    """Milliseconds; of the process that is started for it."""
    times: dict[str, float] = {}

    def find(name: str, query: SampleQuery, offset: int = 0) -> Page:
        started = time.perf_counter()
        page = store.find(query, offset=offset)
        times[name] = 1000 * (time.perf_counter() - started)
        return page

    def detail(name: str, ticket_id: int) -> None:
        started = time.perf_counter()
        assert all(trajectory.tokens for trajectory in store.detail(ticket_id).trajectories)
        times[name] = 1000 * (time.perf_counter() - started)

    started = time.perf_counter()
    store = SampleStore(folder)
    times["open"] = 1000 * (time.perf_counter() - started)
    page = find("first page", SampleQuery())
    times["from the start of Python to the first page"] = 1000 * (time.time() - float(os.environ["STARTED"]))
    total = page.total
    orders: tuple[Order, ...] = ("newest", "best", "worst", "stalest", "longest")
    for order in orders:
        find(f"page in the middle, {order}", SampleQuery(order=order), total // 2)
    find("last page, newest", SampleQuery(), total - 20)
    last = page.rows[0].step or 0
    queries = {
        "by steps": SampleQuery(steps=(last // 3, last // 2)),
        "by reward": SampleQuery(rewards=(1.0, 2.0)),
        "by status": SampleQuery(statuses=("error",)),
        "by staleness": SampleQuery(staleness=(4, 9), order="best"),
        "by prompt": SampleQuery(prompt="question 123"),
        "by everything": SampleQuery((1, last), (0.0, 0.5), ("finished",), (1, 3), "LARGER", "longest"),
    }
    for name, query in queries.items():
        assert find(f"first page {name}", query).total, name
    detail("first sample in full (loads the tokenizer)", page.rows[0].ticket_id)
    detail("another sample in full", total // GROUP_SIZE // 2)
    store.close()
    times["trajectories"] = float(total)
    return times


def looked(folder: Path, *, cold: bool) -> dict[str, float]:
    """A look by a fresh process."""
    if cold:
        for file in folder.iterdir():
            if file.is_file():
                drop_from_cache(file)
    command = [sys.executable, __file__, "--look", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "STARTED": repr(time.time())}
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def drop_from_cache(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def learner_opens(folder: Path, last_step: int) -> float:
    """Milliseconds until a learner that resumes has its journal, all of whose groups a checkpoint holds."""
    started = time.perf_counter()
    Journal(folder / JOURNAL_FILE, saved_step=last_step).close()
    return 1000 * (time.perf_counter() - started)


def measure(folder: Path, gib: float, repeats: int) -> None:
    run = MadeUpRun(folder)
    began = time.perf_counter()
    steps = run.write(int(gib * GIB))
    size = {name: sum(f.stat().st_size for f in folder.glob(name)) / GIB for name in ("journal.*", "samples.*")}
    print(
        f"{steps * PER_STEP:,} groups of {steps:,} steps: journal {size['journal.*']:.2f} GiB, index "
        f"{size['samples.*']:.2f} GiB, written in {time.perf_counter() - began:.0f} s; {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}\n"
    )
    found: dict[str, dict[bool, list[float]]] = defaultdict(lambda: {False: [], True: []})
    for _ in range(repeats):
        for cold in (False, True):
            for name, value in looked(folder, cold=cold).items():
                found[name][cold].append(value)
    print(f"{found.pop('trajectories')[False][0]:,.0f} trajectories\n")
    print("| | ms | cold, ms |\n|---|---:|---:|")
    for name, values in found.items():
        print(f"| {name} | {median(values[False]):.0f} | {median(values[True]):.0f} |")
    opened = median(learner_opens(folder, steps) for _ in range(repeats))
    print(f"| a learner that resumes opens the journal | {opened:.0f} | |")
    print(f"| index of a step of {PER_STEP} x {GROUP_SIZE} samples | {median(run.index_ms):.1f} | |")
    tail = sorted(run.index_ms)[-max(1, len(run.index_ms) // 100)]
    print(f"| the slowest 1 % of these | {tail:.1f} | |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=10.0, help="of groups")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where the run is made up (and removed)")
    parser.add_argument("--look", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.look:
        print(json.dumps(look(options.look)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="asyncrl-bench-") as name:
        measure(Path(name), options.gib, options.repeats)


if __name__ == "__main__":
    main()
