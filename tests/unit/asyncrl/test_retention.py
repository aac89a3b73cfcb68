"""Groups that stay in the journal after their checkpoint: how many, which, and that no restart depends on them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import asyncrl.journal.segments
from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError
from asyncrl.journal import integrity as journal_check
from asyncrl.journal.reader import JournalReader
from asyncrl.journal.segments import segment_files
from asyncrl.journal.writer import JOURNAL_FILE, Journal
from learner.checkpoint.saver import Saver
from learner.progress import Progress
from learner.tickets.ledger import TicketLedger
from tests.unit.asyncrl.test_journal_payloads import keep, make_group, take, wait_until_gone

PER_STEP = 2


def train(journal: Journal, *steps: int) -> int:
    """Two groups a step. Returns the bytes of one."""
    for step in steps:
        groups = [make_group(PER_STEP * step + n, versions=3) for n in range(PER_STEP)]
        keep(journal, *groups)
        take(journal, step, *groups)
    return journal.payload_bytes // (PER_STEP * len(steps))


def kept_steps(journal: Journal) -> list[int]:
    assert journal.path is not None
    reader = JournalReader(journal.path)
    try:
        return sorted(reader.kept_steps())
    finally:
        reader.close()


def test_after_a_checkpoint_the_newest_groups_stay_within_the_budget(tmp_path: Path) -> None:
    journal = Journal(tmp_path / JOURNAL_FILE)
    one = train(journal, 1, 2, 3, 4, 5)
    room = 2 * PER_STEP * one + one  # for two steps and a half: whole steps go
    assert journal.forget_payloads(4, keep_bytes=room) == 3
    assert kept_steps(journal) == [3, 4, 5], "of the steps that the checkpoint holds two, and what it does not hold"
    assert journal.forget_payloads(5, keep_bytes=room) == 4
    assert kept_steps(journal) == [4, 5]
    assert journal.forget_payloads(5, keep_bytes=0) == 6
    assert journal.payload_bytes == 0
    journal.close()


def test_what_a_restart_needs_is_counted_without_what_is_only_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path / JOURNAL_FILE)
    one = train(journal, 1, 2, 3)
    assert journal.needed_bytes == journal.payload_bytes
    journal.forget_payloads(2, keep_bytes=1 << 30)
    assert journal.payload_bytes == 3 * PER_STEP * one
    assert journal.needed_bytes == PER_STEP * one
    journal.close()
    journal = Journal(tmp_path / JOURNAL_FILE, saved_step=2)
    assert journal.needed_bytes == PER_STEP * one, "a restart knows it too"
    journal.close()


class Written:
    """A reporter that has nothing to write."""

    def finish_samples(self) -> None: ...

    def forget_tokens(self, before_step: int) -> None: ...


def test_kept_groups_do_not_make_a_checkpoint_due(
    tmp_path: Path, make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(trainer={"journal_limit_mib": 1, "max_steps": 100})
    journal = Journal(tmp_path / JOURNAL_FILE)
    ledger = TicketLedger(journal, prompts_per_step=PER_STEP, bound=0, total_groups=0)
    nothing: Any = None
    names = {"run_id": "", "architecture": "", "base": ""}
    saver = Saver(config, nothing, nothing, ledger, journal, Written(), **names)  # type: ignore[arg-type]
    monkeypatch.setattr("learner.checkpoint.saver.MIB", 1000)
    train(journal, 1, 2)
    assert saver.is_due(Progress(100, 2, 2))
    saver.forget_groups(2)
    assert kept_steps(journal) == [1, 2]
    assert not saver.is_due(Progress(100, 2, 2)), "they are kept, but nothing waits for a checkpoint"
    journal.close()


def test_files_whose_groups_are_over_the_budget_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncrl.journal.segments, "SEGMENT_BYTES", 1000)
    journal = Journal(tmp_path / JOURNAL_FILE)
    assert journal.path is not None
    one = train(journal, 1, 2, 3, 4)
    before = segment_files(journal.path)
    assert len(before) == 4
    journal.forget_payloads(4, keep_bytes=PER_STEP * one)
    wait_until_gone(*(before[number] for number in (1, 2, 3)))
    assert list(segment_files(journal.path)) == [4]
    assert journal.group(PER_STEP * 4).token_ids.size
    journal.close()


def test_files_of_kept_groups_are_not_held_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may open 1,024 files; 100 GiB of groups lie in 1,600."""
    monkeypatch.setattr(asyncrl.journal.segments, "SEGMENT_BYTES", 1000)
    journal = Journal(tmp_path / JOURNAL_FILE)
    train(journal, 1)
    before = len(os.listdir("/proc/self/fd"))
    train(journal, *range(2, 40))
    assert len(os.listdir("/proc/self/fd")) == before
    journal.flush()
    journal.close()
    journal = Journal(tmp_path / JOURNAL_FILE)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert journal.group(PER_STEP).ticket_id == PER_STEP
    journal.close()


def test_the_groups_that_a_checkpoint_holds_are_not_read_when_a_journal_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / JOURNAL_FILE)
    train(journal, *range(1, 11))
    keep(journal, make_group(1000))
    journal.close()
    read: list[int] = []
    original = journal_check.read_place
    monkeypatch.setattr(journal_check, "read_place", lambda fd, place: read.append(place.length) or original(fd, place))
    Journal(tmp_path / JOURNAL_FILE, saved_step=9).close()
    assert len(read) == PER_STEP + 1, "those of the tenth step, and the one that waits"


def test_damage_to_a_group_that_is_only_kept_does_not_stop_a_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncrl.journal.segments, "SEGMENT_BYTES", 1000)
    journal = Journal(tmp_path / JOURNAL_FILE)
    train(journal, 1, 2, 3)
    journal.close()
    files = segment_files(tmp_path / JOURNAL_FILE)
    files[1].unlink()
    files[2].write_bytes(bytes(100))
    with pytest.raises(BadStateError, match="is missing"):
        Journal(tmp_path / JOURNAL_FILE)
    journal = Journal(tmp_path / JOURNAL_FILE, saved_step=2)
    assert journal.group(PER_STEP * 3).ticket_id == PER_STEP * 3
    with pytest.raises(BadStateError, match="damaged"):
        journal.group(PER_STEP * 1)
    journal.forget_payloads(3)
    journal.close()
    Journal(tmp_path / JOURNAL_FILE).close()


def test_the_journal_stays_sound_while_groups_come_and_go(tmp_path: Path) -> None:
    """Its digest and account are checked whenever it is opened."""
    one = expected = 0
    for step in range(1, 13):
        journal = Journal(tmp_path / JOURNAL_FILE, saved_step=step - 1)
        before = journal.payload_bytes
        train(journal, step)
        one = one or journal.payload_bytes - before
        journal.forget_payloads(step, keep_bytes=(step % 4) * one)
        expected = min(step % 4, expected + 1)
        assert len(kept_steps(journal)) == expected
        journal.close()
    Journal(tmp_path / JOURNAL_FILE).close()
