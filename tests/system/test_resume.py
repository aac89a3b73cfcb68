"""A run that was killed and resumed is the unbroken run: order, groups, and at staleness 0 every bit of the weights."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.journal import JOURNAL_FILE
from asyncrl.models.loading import load_model
from asyncrl.models.published import published_tensors
from asyncrl.telemetry.jsonl import read_lines
from tests.rigs.two_processes import start, with_ports, write_config

pytestmark = pytest.mark.slow
STEPS = 7
CRASHES = (
    "group.journaled:2",
    "journal.data_file_written:2",
    "step.consumed:2",
    "step.trained:1",
    "checkpoint.writing:1",
    "weights.publishing:50",  # within the second publication, of a whole model and of an adapter, which has 28 tensors
)
"""One after the other in one run: each learner but the last dies at such a place."""


def resume_config(make_config: Callable[..., RunConfig], run: Path, **learner: Any) -> RunConfig:
    config = make_config(
        learner={"max_staleness": 0, **learner},
        evaluation={"before_training": True, "every_steps": 2},
        trainer={"max_steps": STEPS, "samples_per_step": 4, "save_freq": 3},
        network={"timeout_s": 5.0},
    )
    return config.model_copy(update={"run_dir": str(run)})


def run_killed(config: RunConfig, run: Path, places: Sequence[str] = CRASHES) -> None:
    """Learners that die at each of these places in turn, then one that finishes; every other server dies as well."""
    file = write_config(with_ports(config), run)
    server = start("rollout_server", file)
    try:
        for number, place in enumerate((*places, "")):
            resume = ["--resume"] if (run / JOURNAL_FILE).exists() else []
            learner = start("learner", file, *resume, crash_at=place)
            code = learner.wait(timeout=120)
            assert code == (-9 if place else 0), f"{place}: {code}\n{(run / 'learner.log').read_text()[-3000:]}"
            if place and number % 2:
                server.kill()
                server.wait()
                server = start("rollout_server", file)
        assert server.wait(timeout=60) == 0
    finally:
        server.kill()


def batches(run: Path) -> list[tuple[int, int, int]]:
    """Step, ticket and position of every group that was trained."""
    with sqlite3.connect(run / JOURNAL_FILE) as db:
        return db.execute("SELECT step, ticket_id, position FROM consumption ORDER BY step, ticket_id").fetchall()


def sampled(run: Path) -> list[tuple[int, str, list[list[int]]]]:
    """Step, row and token ids of every group that was trained, as the learner recorded them."""
    lines = read_lines(run / "samples.jsonl")
    return [(s["step"], s["row_id"], [c["token_ids"] for c in s["completions"]]) for s in lines]


def recorded(run: Path) -> list[list[float]]:
    keys = ("step", "loss", "grad_norm", "reward/mean", "entropy", "logprob_diff_max")
    lines = read_lines(run / "metrics.jsonl")
    return [[line[key] for key in keys] for line in lines]


def evaluations(run: Path) -> list[tuple[int, float]]:
    lines = read_lines(run / "evaluations.jsonl")
    return [(line["step"], line["accuracy"]) for line in lines]


def weights(run: Path, config: RunConfig) -> dict[str, torch.Tensor]:
    model = load_model(config.model.model_copy(update={"path": str(run / "export")}), device=torch.device("cpu"))
    return dict(published_tensors(model))


def assert_same_run(run: Path, whole: Path, config: RunConfig) -> None:
    assert batches(run) == batches(whole)
    assert sampled(run) == sampled(whole)
    assert recorded(run) == recorded(whole)
    assert evaluations(run) == evaluations(whole)
    mine, theirs = weights(run, config), weights(whole, config)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_killed_again_and_again_a_run_on_policy_ends_with_the_same_bits(
    make_config: Callable[..., RunConfig], tmp_path: Path, on_policy: Path
) -> None:
    run = tmp_path / "killed"
    config = resume_config(make_config, run)
    run_killed(config, run)
    assert_same_run(run, on_policy, config)


def test_a_server_that_dies_within_a_batch_changes_no_bit(
    make_config: Callable[..., RunConfig], tmp_path: Path, on_policy: Path
) -> None:
    run = tmp_path / "killed"
    config = resume_config(make_config, run)
    config = config.model_copy(update={"network": config.network.model_copy(update={"timeout_s": 2.0})})
    file = write_config(with_ports(config), run)
    learner = start("learner", file)
    try:
        for groups_sent in (17, 2, 7, 1):  # 16 are the evaluation's
            server = start("rollout_server", file, crash_at=f"group.sent:{groups_sent}")
            assert server.wait(timeout=120) == -9
        server = start("rollout_server", file)
        assert [learner.wait(timeout=120), server.wait(timeout=60)] == [0, 0], (run / "learner.log").read_text()
    finally:
        learner.kill()
        server.kill()
    assert_same_run(run, on_policy, config)


def test_off_policy_the_steps_after_a_checkpoint_are_made_again_as_they_were(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = resume_config(make_config, run, max_staleness=2)
    trainer = {"max_steps": 12, "save_freq": 4, "save_async": False}
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update=trainer)})
    file = write_config(with_ports(config), run)
    server = start("rollout_server", file)
    try:
        assert start("learner", file, crash_at="step.trained:8").wait(timeout=120) == -9
        before = batches(run), sampled(run), recorded(run)
        assert [line[0] for line in before[2]] == [1, 2, 3, 4, 5, 6, 7], "the eighth step was trained and not reported"
        assert max(step for step, *_ in before[0]) == 8
        changed = start("learner", file, "--resume", "batch.prompts_per_step=2", "learner.on_stale=drop")
        assert changed.wait(timeout=60) == 2
        refusal = (run / "learner.log").read_text().splitlines()[-1]
        assert "batch.prompts_per_step was 4, is 2" in refusal
        assert "learner.on_stale was wait, is drop" in refusal
        assert start("learner", file, "--resume").wait(timeout=120) == 0, (run / "learner.log").read_text()[-3000:]
        assert server.wait(timeout=60) == 0
    finally:
        server.kill()
    assert "making steps 5 to 8 again, from the journal" in (run / "learner.log").read_text()
    # One of them was running when the learner died: it is made again, of its own version, and recorded once.
    recorded_evaluations = read_lines(run / "evaluations.jsonl")
    assert [(e["step"], e["version"], e["rows"]) for e in recorded_evaluations] == [(s, s, 16) for s in range(0, 13, 2)]
    trained_before, sampled_before, recorded_before = before
    assert batches(run)[: len(trained_before)] == trained_before
    assert sampled(run)[: len(sampled_before)] == sampled_before
    assert recorded(run)[: len(recorded_before)] == recorded_before
    assert sorted(position for *_, position in batches(run)) == list(range(48))
