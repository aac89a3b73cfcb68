"""A run whose filters drop most groups: its epochs end, and killed again and again it is the unbroken run."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.installed_methods import methods
from asyncrl.config.schema import RunConfig
from asyncrl.journal import JOURNAL_FILE
from tests.rigs.made_again import is_made_again
from tests.rigs.small_runs import logs
from tests.rigs.two_processes import run_both, start, with_ports, write_config
from tests.system.test_resume import assert_same_run, batches, recorded, run_killed, sampled

pytestmark = pytest.mark.slow
ROWS, EPOCHS = 16, 3
REWARD = """
def teaches(sample):
    row = int(sample.row_id.rpartition(":")[2])
    return float(row % 4 == 1) if row % 4 < 2 else float(len(sample.completion) % 2)
"""
"""A quarter of the rows is impossible and a quarter trivial."""


def test_a_killed_run_with_filters_and_greso_ends_its_epochs_with_the_same_bits(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    config = make_config(
        data={"max_train_rows": ROWS, "max_response_length": 16},
        algorithm={"filters": ["zero_variance"], **{name: {} for name in methods("prompt_source") if name == "greso"}},
        reward={"functions": [{"function": f"{tmp_path / 'reward.py'}:teaches"}], "workers": 1},
        rollout={"engine": "scripted", "engine_args": {"length_sigma": 0.5}},
        trainer={"max_steps": 0, "total_epochs": EPOCHS, "samples_per_step": 4, "save_freq": 2},
        network={"timeout_s": 5.0},
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run_both(config.model_copy(update={"run_dir": str(whole)}), whole) == (0, 0), logs(whole)
    places = ("group.journaled:2", "step.trained:2")
    run_killed(config.model_copy(update={"run_dir": str(killed)}), killed, places)
    assert_same_run(killed, whole, config)
    assert account(killed) == account(whole)

    consumed, filtered, counters = account(whole)
    assert not {position for position, _ in consumed} & {position for position, _ in filtered}
    passed = counters["skipped"] + ROWS * EPOCHS - counters["next_position"]
    assert len(consumed) + len(filtered) + passed == ROWS * EPOCHS, (
        "every position was trained, filtered or passed over"
    )
    assert len(filtered) >= ROWS // 2
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert all(line["zero_variance_groups"] == line["ledger_residual"] == 0 for line in lines)
    assert lines[-1]["dropped/zero_variance"] == len(filtered)
    status = json.loads((whole / "status.json").read_text())
    assert (status["phase"], status["step"]) == ("finished", len(lines))
    assert status["total_steps"] == len(lines) < ROWS * EPOCHS // 4, "the run ended with its data"
    assert "the data is used up at step" in (whole / "learner.log").read_text()


def test_a_killed_run_replays_the_same_groups_again(
    make_config: Callable[..., RunConfig], tmp_path: Path, one_thread: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where half of the groups have no spread and rollouts are slow, steps fill up from the replay buffer. The learner
    dies four steps after its checkpoint, which keeps no group that is too old to be replayed; `asyncrl replay` makes
    such a step again, too."""
    (tmp_path / "reward.py").write_text(REWARD)
    run, bound = tmp_path / "run", 2
    config = make_config(
        learner={"max_staleness": bound},
        algorithm={"filters": ["zero_variance"], "replay_buffer_size": 64},
        reward={"functions": [{"function": f"{tmp_path / 'reward.py'}:teaches"}], "workers": 1},
        rollout={
            "engine": "scripted",
            "engine_args": {"length_sigma": 0.5, "seconds_per_token": 0.03},
            "max_concurrent_sequences": 8,
        },
        trainer={"max_steps": 9, "samples_per_step": 4, "save_freq": 4, "save_async": False, "keep_samples_gib": 0.0},
        network={"timeout_s": 5.0},
    )
    file = write_config(with_ports(config), run)
    server = start("rollout_server", file)
    try:
        assert start("learner", file, crash_at="step.trained:8").wait(timeout=120) == -9, logs(run)
        assert is_made_again(run, 7), capsys.readouterr().out
        before = batches(run), replayed(run), sampled(run), recorded(run)
        assert start("learner", file, "--resume").wait(timeout=120) == 0, logs(run)
        assert server.wait(timeout=60) == 0
    finally:
        server.kill()
    assert "making steps 5 to 8 again, from the journal" in (run / "learner.log").read_text()
    for was, read in zip(before, (batches, replayed, sampled, recorded), strict=True):
        assert was
        assert read(run)[: len(was)] == was
    assert {step for step, _ in before[1]} & {5, 6, 7}, "groups were replayed after the checkpoint"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    again = Counter(step for step, _ in replayed(run))
    new = Counter(step for step, *_ in batches(run))
    assert [again[line["step"]] for line in lines] == [line["replayed_groups"] for line in lines]
    assert [new[line["step"]] + again[line["step"]] for line in lines] == [4] * 9
    assert all(line["zero_variance_groups"] == line["ledger_residual"] == 0 for line in lines)
    assert all(line["staleness/max"] <= bound for line in lines)


def replayed(run: Path) -> list[tuple[int, int]]:
    """Step and ticket of each group that was trained once more."""
    with sqlite3.connect(run / JOURNAL_FILE) as db:
        return db.execute("SELECT step, ticket_id FROM replayed ORDER BY step, ticket_id").fetchall()


def account(run: Path) -> tuple[list[tuple[int, int]], list[tuple[int, str]], dict[str, int]]:
    """(position, step) of the trained groups, (position, reason) of the filtered ones, and the ledger's counters."""
    with sqlite3.connect(run / JOURNAL_FILE) as db:
        return (
            db.execute("SELECT position, step FROM consumption ORDER BY position").fetchall(),
            db.execute("SELECT position, reason FROM filtered ORDER BY position").fetchall(),
            dict(db.execute("SELECT name, count FROM ledger").fetchall()),
        )
