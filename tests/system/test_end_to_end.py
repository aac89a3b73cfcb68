"""Two real processes, from a configuration file to an exported folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import RunConfig
from tests.rigs.plain_accuracy import plain_accuracy
from tests.rigs.small_runs import logs
from tests.rigs.two_processes import run_both

pytestmark = pytest.mark.slow


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # the last may be half-written


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param({}, id="torch"),
        pytest.param({"engine": "fsdp2", "num_processes": 2}, id="fsdp2 on two ranks"),
    ],
)
def test_asynchronous_training_raises_the_reward_and_exports_a_folder(
    make_config: Callable[..., RunConfig], tmp_path: Path, engine: dict[str, Any]
) -> None:
    check_asynchronous_training(make_config, tmp_path, engine)


def check_asynchronous_training(make_config: Callable[..., RunConfig], tmp_path: Path, engine: dict[str, Any]) -> None:
    """Train for 24 steps with this engine, and read what the run has left."""
    run = tmp_path / "run"
    config = make_config(
        learner={**engine, "max_staleness": 2, "optim": {"lr": 3e-3, "weight_decay": 0.0}},
        batch={"prompts_per_step": 8, "group_size": 8, "tokens_per_microbatch": 1024},
        rollout={"weights_channel": "zmq"},
        evaluation={"before_training": True, "every_steps": 12, "by": "kind"},
        trainer={"max_steps": 24, "samples_per_step": 1},
    )
    assert run_both(config, run) == (0, 0), logs(run)

    steps = lines(run / "metrics.jsonl")
    rewards = [step["reward/mean"] for step in steps]
    assert len(steps) == 24
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2, rewards
    assert max(step["staleness/max"] for step in steps) in (1, 2)
    assert all(step["ledger_residual"] == 0 for step in steps)
    assert all(step["rows/error"] == step["rows/timed_out"] == 0 for step in steps)

    evaluations = lines(run / "evaluations.jsonl")
    assert [e["step"] for e in evaluations] == [0, 12, 24]
    assert evaluations[-1]["accuracy"] > evaluations[0]["accuracy"]
    for evaluation in evaluations:
        kinds = [key.removeprefix("accuracy/") for key in evaluation if key.startswith("accuracy/kind=")]
        mean = sum(evaluation[f"accuracy/{kind}"] * evaluation[f"rows/{kind}"] for kind in kinds) / evaluation["rows"]
        assert len(kinds) > 1
        assert mean == pytest.approx(evaluation["accuracy"])
    assert plain_accuracy(config, run / "export") == pytest.approx(evaluations[-1]["accuracy"], abs=1e-9)

    samples = lines(run / "samples.jsonl")
    assert all((run / "images" / f"{digest}.png").is_file() for s in samples for digest in s["images"])


def test_a_bad_row_is_left_out_by_name_and_the_others_are_trained(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    bad = [{"prompt": f"What is {n}?", "answer": str(n), "images": []} for n in range(8)]
    bad[5]["prompt"] = "word " * 500
    rows.write_text("".join(json.dumps(row) + "\n" for row in bad))
    config = make_config(data={"train_files": [str(rows)], "val_files": [], "shuffle": False})
    run = tmp_path / "run"
    assert run_both(config, run) == (0, 0), logs(run)
    (left_out,) = lines(run / "bad_rows.jsonl")
    assert left_out["row_id"] == "rows.jsonl:5"
    assert "data.max_prompt_length" in left_out["reason"]
    assert "rows.jsonl:5" in (run / "learner.log").read_text()
    trained = {sample["row_id"] for sample in lines(run / "samples.jsonl")}
    assert trained
    assert "rows.jsonl:5" not in trained
