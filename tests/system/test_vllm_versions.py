"""From vLLM's own record of versions to the journal, through a real learner that updates running sequences."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.journal.writer import JOURNAL_FILE, Journal
from protocol.messages import Group
from tests.rigs.recording_server import RECORD
from tests.rigs.small_runs import logs
from tests.rigs.two_processes import start, with_ports, write_config
from tests.rigs.vllm_rig import MISSING

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING, reason="vLLM is not installed: WITH_VLLM=1 bash scripts/install.sh"),
]

LENGTH, WANTED = 96, 5
"""Tokens at most, and completions that were updated while they ran."""


def recorded(file: Path) -> dict[tuple[int, int], list[int]]:
    """Version of each token of each completion, by ticket and index."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {
        (ticket, index): [int(version) for version, start, end in spans for _ in range(end - start)]
        for ticket, index, spans in map(json.loads, lines)
    }


def journaled(run: Path) -> list[Group]:
    """All groups in the journal of a learner that has died before it could forget any."""
    journal = Journal(run / JOURNAL_FILE)
    try:
        slots = [*journal.state().buffered, *(slot for step in range(1, 100) for slot in journal.consumed(step))]
        return [journal.group(slot.ticket_id) for slot in slots]
    finally:
        journal.close()


def test_versions_in_the_journal_are_those_that_vllm_stamped_on_sequences_that_were_updated_while_they_ran(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer sequences at a time than there are: some always run when the learner has the groups of its step."""
    run, record = tmp_path / "run", tmp_path / "record"
    monkeypatch.setenv(RECORD, str(record))
    config = make_config(
        learner={"max_staleness": 2},
        batch={"prompts_per_step": 2, "group_size": 2, "tokens_per_microbatch": 2048},
        data={"max_response_length": LENGTH, "val_files": []},
        rollout={"engine": "vllm", "max_concurrent_sequences": 5, "weight_update": "recompute"},
        trainer={"max_steps": 99, "total_epochs": 99},
    ).model_copy(update={"run_dir": str(run)})
    file = write_config(with_ports(config), run)
    services = [start("learner", file), start("tests.rigs.recording_server", file)]
    try:
        deadline = time.monotonic() + 90
        while sum(len(set(versions)) > 1 for versions in recorded(record).values()) < 2 * WANTED:
            assert [service.poll() for service in services] == [None, None], logs(run)
            assert time.monotonic() < deadline, logs(run)
            time.sleep(0.1)
    finally:
        for service in services:
            service.kill()
            service.wait()
    vllms, updated = recorded(record), 0
    groups = journaled(run)
    assert len(groups) > WANTED
    for group in groups:
        ends = np.cumsum(group.lengths)
        for index, versions in enumerate(np.split(group.versions, ends[:-1])):
            assert versions.tolist() == vllms[group.ticket_id, index]
            assert versions.tolist() == sorted(versions.tolist())
            updated += len(set(versions.tolist())) > 1
    assert updated >= WANTED
