"""Two real processes, from a configuration file to an exported folder."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.models.loading import load_model
from asyncrl.models.published import published_tensors
from asyncrl.tools.evaluate import evaluate
from tests.rigs.small_runs import logs
from tests.rigs.two_processes import run_both, start, with_ports, write_config
from tests.rigs.waiting import wait_until

pytestmark = pytest.mark.slow


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # the last may be half-written


def weights(folder: Path, config: RunConfig) -> dict[str, torch.Tensor]:
    model = load_model(config.model.model_copy(update={"path": str(folder)}), device=torch.device("cpu"))
    return dict(published_tensors(model))


def test_asynchronous_training_raises_the_reward_and_exports_a_folder(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = make_config(
        learner={"max_staleness": 2, "optim": {"lr": 3e-3, "weight_decay": 0.0}},
        batch={"prompts_per_step": 8, "group_size": 8, "tokens_per_microbatch": 1024},
        rollout={"weights_channel": "zmq"},
        evaluation={"before_training": True, "every_steps": 20},
        trainer={"max_steps": 40, "samples_per_step": 1},
    )
    assert run_both(config, run) == (0, 0), logs(run)

    steps = lines(run / "metrics.jsonl")
    rewards = [step["reward/mean"] for step in steps]
    assert len(steps) == 40
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2, rewards
    assert max(step["staleness/max"] for step in steps) in (1, 2)
    assert all(step["ledger_residual"] == 0 for step in steps)
    assert all(step["rows/error"] == step["rows/timed_out"] == 0 for step in steps)

    evaluations = lines(run / "evaluations.jsonl")
    assert [e["step"] for e in evaluations] == [0, 20, 40]
    assert evaluations[-1]["accuracy"] > evaluations[0]["accuracy"]
    again = evaluate(config, run / "export")
    assert again.accuracy == pytest.approx(evaluations[-1]["accuracy"], abs=1e-9)

    samples = lines(run / "samples.jsonl")
    assert all((run / "images" / f"{digest}.png").is_file() for s in samples for digest in s["images"])


def test_a_run_that_was_killed_and_resumed_equals_the_unbroken_run(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make_config(trainer={"max_steps": 6, "samples_per_step": 4, "save_freq": 2})
    whole = config.model_copy(update={"run_dir": str(tmp_path / "whole")})
    assert run_both(whole, tmp_path / "whole") == (0, 0), logs(tmp_path / "whole")

    run = tmp_path / "broken"
    broken = with_ports(config.model_copy(update={"run_dir": str(run)}))
    file = write_config(broken, run)
    services = [start("learner", file), start("rollout_server", file)]
    try:
        wait_until(lambda: any((run / "checkpoints").glob("step-*")), "a checkpoint", run)
        services[0].send_signal(signal.SIGKILL)
        services[0].wait()
        services[1].terminate()
        services[1].wait(timeout=30)
        changed = start("learner", file, "--resume", "batch.prompts_per_step=2", "learner.on_stale=drop")
        assert changed.wait(timeout=60) == 2
        said = (run / "learner.log").read_text()
        assert "batch.prompts_per_step was 4, is 2" in said
        assert "learner.on_stale was wait, is drop" in said
        services = [start("learner", file, "--resume"), start("rollout_server", file)]
        assert [service.wait(timeout=120) for service in services] == [0, 0], logs(run)
    finally:
        for service in services:
            service.kill()

    same = ("step", "loss", "grad_norm", "reward/mean", "entropy")
    unbroken = [[step[key] for key in same] for step in lines(tmp_path / "whole" / "metrics.jsonl")]
    assert [[step[key] for key in same] for step in lines(run / "metrics.jsonl")] == unbroken
    rows = [sample["row_id"] for sample in lines(tmp_path / "whole" / "samples.jsonl")]
    assert [sample["row_id"] for sample in lines(run / "samples.jsonl")] == rows
    mine, theirs = weights(run / "export", config), weights(tmp_path / "whole" / "export", config)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_late_second_server_shares_the_work_and_both_endpoints_can_be_scraped(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    endless = {"max_steps": 100_000, "samples_per_step": 0}
    config = with_ports(make_config(learner={"max_staleness": 1}, trainer=endless))
    file = write_config(config, run)
    second = config.telemetry.model_copy(update={"rollout_port": 0})
    other = write_config(config.model_copy(update={"telemetry": second}), tmp_path / "second")
    services = [start("learner", file), start("rollout_server", file)]
    try:
        wait_until(lambda: (run / "metrics.jsonl").exists(), "the first step", run)
        services.append(start("rollout_server", other))
        learner_log = run / "learner.log"
        wait_until(lambda: learner_log.read_text().count("is welcome") == 2, "the second server", run)
        steps = len(lines(run / "metrics.jsonl"))
        wait_until(lambda: len(lines(run / "metrics.jsonl")) > steps + 20, "20 steps with two servers", run)
        for port, name in (
            (config.telemetry.learner_port, "asyncrl_learner_token_staleness_versions_bucket"),
            (config.telemetry.rollout_port, "asyncrl_rollout_groups_total"),
        ):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                assert name in answer.read().decode()
        services[0].terminate()
        codes = [service.wait(timeout=60) for service in services]
        assert codes == [130, 4, 4], logs(run) + logs(tmp_path / "second")
    finally:
        for service in services:
            service.kill()
    assert all(step["ledger_residual"] == 0 and step["staleness/max"] <= 1 for step in lines(run / "metrics.jsonl"))


def test_a_bad_row_stops_the_run_with_its_name_and_the_server_is_told(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    bad = [{"prompt": f"What is {n}?", "answer": str(n), "images": []} for n in range(8)]
    bad[5]["prompt"] = "word " * 500
    rows.write_text("".join(json.dumps(row) + "\n" for row in bad))
    config = make_config(data={"train_files": [str(rows)], "val_files": [], "shuffle": False})
    codes = run_both(config, tmp_path / "run")
    assert codes == (2, 4), logs(tmp_path / "run")
    learner = (tmp_path / "run" / "learner.log").read_text()
    assert "error: row rows.jsonl:5" in learner
    assert "data.max_prompt_length" in learner
    assert "the learner says goodbye" in (tmp_path / "run" / "rollout_server.log").read_text()
