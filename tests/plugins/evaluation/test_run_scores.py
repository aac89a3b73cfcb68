"""`asyncrl eval` of a run's export scores held-out rows as the run itself did."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.cli import main
from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.jsonl import read_lines
from tests.rigs.small_runs import logs
from tests.rigs.tiny import ROOT
from tests.rigs.two_processes import run_both, start_command

pytestmark = pytest.mark.slow


def test_a_finished_run_is_scored_as_it_scored_itself(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, rows = finished_run, tmp_path / "rows.jsonl"
    assert main(["eval", str(run / "config.yaml"), "--model", str(run / "export"), "--out", str(rows)]) == 0
    evaluation = json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])
    printed = capsys.readouterr().out
    assert f"mean short {evaluation['accuracy']:.4f} ±" in printed, "the same as the run's own, of a graded reward"
    assert "do not compare" not in printed
    assert f"components   short {evaluation['accuracy']:.4f}" in printed
    found = [json.loads(line)["components"]["short"] for line in rows.read_text().splitlines()]
    assert sum(found) / len(found) == pytest.approx(evaluation["accuracy"])


def test_an_environment_plays_held_out_rows_and_rewards_alone(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """An evaluation's score is what the turns have earned, where `reward.functions` is empty. It has a third turn, and
    training two."""
    config = make_config(
        environment={
            "name": str(ROOT / "tests" / "rigs" / "lamp.py:Lamp"),
            "limits": {"turns": 2, "tokens_per_turn": 16, "images": 4},
            "workers": 1,
            "instances_per_worker": 16,
        },
        data={"max_response_length": 60, "max_prompt_length": 390, "max_val_rows": 3},
        reward={"functions": []},
        rollout={"engine": "scripted", "engine_args": {"text": "answer 1"}},
        evaluation={"before_training": True, "every_steps": 1, "group_size": 2, "limits": {"turns": 3, "tokens": 160}},
        trainer={"max_steps": 1},
    )
    assert run_both(config, tmp_path / "run") == (0, 0), logs(tmp_path / "run")
    lines = (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()
    for evaluation in map(json.loads, lines):
        assert (evaluation["rows"], evaluation["group_size"], evaluation["errors"]) == (3, 2, 0)
        assert evaluation["accuracy"] == evaluation["reward"] == evaluation["best"] == 0.75
        assert (evaluation["env/turns"], evaluation["env/ends/done"]) == (3, 6)
    assert len(lines) == 2
    (step,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert step["accuracy"] == step["reward/mean"] == 0.5
    assert (step["env/turns"], step["env/ends/turns"]) == (2, 16)

    check_played_again(tmp_path)


def check_played_again(tmp_path: Path) -> None:
    """Assert that `asyncrl eval` scores the run's held-out rows as the run did."""
    run, log, out = tmp_path / "run", tmp_path / "eval.log", tmp_path / "scores.jsonl"
    evaluate = ("eval", str(run / "config.yaml"), "--model", str(run / "export"), "--out", str(out))
    assert start_command(*evaluate, log=log).wait(timeout=120) == 0, log.read_text()
    said = log.read_text()
    assert "mean reward 0.7500" in said, "the same rows, played as in the run"
    assert "conversations   turns 3.0000" in said
    assert "ends   done 6\n" in said
    scored = read_lines(out)
    assert [(one["reward"], one["end"], len(one["turns"])) for one in scored] == [(0.75, "done", 3)] * 6
    assert scored[0]["turns"][0]["shown"][0]["parts"][0] == "8 signs"
