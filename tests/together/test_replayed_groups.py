"""Steps that train groups of earlier steps once more (methods), made again by `asyncrl replay`."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.journal import JOURNAL_FILE
from asyncrl.telemetry.jsonl import read_lines
from asyncrl_plugins.replay import replay
from tests.rigs.filtered_run import REWARD
from tests.rigs.small_runs import logs
from tests.rigs.two_processes import start, with_ports, write_config
from tests.system.test_resume import batches, recorded, sampled

pytestmark = pytest.mark.slow


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
        algorithm={"filters": ["zero_variance"], "ssb": {"size": 64}},
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
        assert replay.main([str(run), "--step", "7"]) == 0, capsys.readouterr().out
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
    lines = read_lines(run / "metrics.jsonl")
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
