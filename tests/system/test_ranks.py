"""A learner of two ranks is the learner of one: the same steps, and after the death of a rank the same run."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config.schema import RunConfig
from asyncrl.journal import JOURNAL_FILE
from asyncrl.models.lora import ADAPTER_WEIGHTS
from asyncrl.telemetry.jsonl import read_lines
from learner.ranks.group import ALONE
from learner.training.engine import TorchEngine
from learner.training.roles import Critic
from tests.conftest import small_config
from tests.rigs.one_process import in_one_process
from tests.rigs.prefork import rank_of
from tests.rigs.rank_rig import run_ranks, take_steps
from tests.rigs.small_runs import logs
from tests.rigs.two_processes import start_command, write_config
from tests.rigs.waiting import wait_until

pytestmark = pytest.mark.slow
MakeConfig = Callable[..., RunConfig]
RANKS = {"engine": "fsdp2", "num_processes": 2, "optim": {"lr": 1e-3, "weight_decay": 0.01}}
BF16 = {"dtype": "bfloat16"}
CASES: dict[str, dict[str, Any]] = {
    "one micro-batch, frozen tower": {
        "batch": {"tokens_per_microbatch": 4096},
        "model": {"freeze_vision_tower": True},
    },
    "four micro-batches, two updates": {
        "batch": {"tokens_per_microbatch": 160},
        "algorithm": {"updates_per_batch": 2},
        "learner": {"gradient_checkpointing": True},
    },
    "critic and reference, bf16": {"algorithm": {"adv_estimator": "gae", "kl_loss_coef": 0.1}, "model": BF16},
    "moving reference": {"algorithm": {"kl_loss_coef": 0.1}, "reference": {"ema": 0.9}},
    "exact KL": {"algorithm": {"kl_loss_coef": 0.1, "kl_reward_coef": 0.05, "kl_estimator": "full"}},
    "adapter, exact KL": {
        "model": {"lora": {"rank": 4}},
        "algorithm": {"kl_loss_coef": 0.1, "kl_estimator": "full"},
        "learner": {"gradient_checkpointing": True},
    },
    "adapter, bf16": {
        "model": {**BF16, "lora": {"rank": 4}},
        "algorithm": {"kl_loss_coef": 0.1},
    },
}
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
"""Of metrics, relative above 1: ranks add up in another order."""
FLIPPED = {"float32": 0.0, "bfloat16": 0.005}
"""Share of a model's elements that may have gone the other way: AdamW's first updates are signs of gradients, and one
that is 0 up to the rounding of 16 bits has either sign."""
STEPS = 2
POISONED = "poisoned, bf16"


@dataclass
class TwoRanks:
    """Steps of every case on two ranks: their configurations, folders, and what rank 0 has found."""

    configs: dict[str, RunConfig]
    folder: Path
    found: dict[str, Any]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, digits_data: Path) -> TwoRanks:
    folder = tmp_path_factory.mktemp("ranks") / "two"
    configs = {
        name: small_config(tiny_model, digits_data, folder, **{**case, "learner": {**RANKS, **case.get("learner", {})}})
        for name, case in CASES.items()
    }
    poisoned = {POISONED: small_config(tiny_model, digits_data, folder, model=BF16, learner=RANKS)}
    return TwoRanks(configs, folder, run_ranks(folder, configs | poisoned, steps=STEPS, poisoned=[POISONED]))


@pytest.mark.usefixtures("one_thread")
def test_steps_on_two_ranks_are_the_steps_of_one(two_ranks: TwoRanks, tmp_path: Path) -> None:
    for name, config in two_ranks.configs.items():
        alone = in_one_process(config)
        expected = take_steps(alone, tmp_path / name, ALONE, STEPS)["metrics"]
        tolerance = TOLERANCE[config.model.dtype]
        for mine, theirs in zip(expected, two_ranks.found[name]["metrics"], strict=True):
            assert theirs == pytest.approx(mine, rel=tolerance, abs=tolerance, nan_ok=True), name
        check_weights(alone, tmp_path / name, two_ranks.folder / name)


def test_one_ranks_gradient_that_is_not_finite_stops_all(two_ranks: TwoRanks) -> None:
    check_stopped_before_an_update(two_ranks.folder / POISONED)


def check_stopped_before_an_update(folder: Path) -> None:
    """Both ranks say the same, and no weight has changed."""
    for rank in range(2):
        said = (folder / f"problem-{rank}").read_text()
        assert re.search(r"the gradient norm is (inf|nan)\. The weights are those before", said), said
    before, after = (load_file(folder / f"{when}.safetensors") for when in ("0", "after"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.usefixtures("one_thread")
def test_more_ranks_than_a_step_has_rows_make_the_same_steps(make_config: MakeConfig, tmp_path: Path) -> None:
    """One group of two completions on three ranks: one of them repeats a part, of which nothing counts."""
    batch = {"prompts_per_step": 1, "group_size": 2, "tokens_per_microbatch": 4096}
    config = make_config(batch=batch, learner={**RANKS, "num_processes": 3})
    found = run_ranks(tmp_path / "three", {"one group": config}, steps=STEPS, size=3)["one group"]["metrics"]
    expected = take_steps(in_one_process(config), tmp_path / "alone", ALONE, STEPS)["metrics"]
    tolerance = TOLERANCE["float32"]
    for mine, theirs in zip(expected, found, strict=True):
        assert theirs == pytest.approx(mine, rel=tolerance, abs=tolerance, nan_ok=True)


def steps_alone_and_on_two_ranks(config: RunConfig, folder: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Metrics of each step, by one process and by two ranks, whose weights are compared."""
    theirs = run_ranks(folder / "two", {"ranks": config}, steps=STEPS)["ranks"]["metrics"]
    alone = in_one_process(config)
    mine = take_steps(alone, folder / "alone", ALONE, STEPS)["metrics"]
    check_weights(alone, folder / "alone", folder / "two" / "ranks")
    return list(zip(mine, theirs, strict=True))


def check_weights(config: RunConfig, one: Path, two: Path) -> None:
    """Compare what was published and saved, and load the ranks' checkpoint in one process."""
    lr = config.learner.optim.lr
    for step in range(STEPS + 1):
        mine, theirs = (load_file(folder / f"{step}.safetensors") for folder in (one, two))
        assert mine.keys() == theirs.keys()
        flipped = elements = 0
        for name, tensor in mine.items():
            assert tensor.dtype == theirs[name].dtype
            if step == 0:
                assert torch.equal(tensor, theirs[name]), "the same masters are published as the same bits"
            flipped += int((~torch.isclose(tensor, theirs[name], rtol=1e-2, atol=0.5 * lr)).sum())
            elements += tensor.numel()
        assert flipped <= FLIPPED[config.model.dtype] * elements, f"{flipped} of {elements} elements at step {step}"
    if config.model.lora.rank:
        check_adapter(config, one, two)
        return
    for file in ("config.json", "generation_config.json"):
        assert json.loads((one / "model" / file).read_text()) == json.loads((two / "model" / file).read_text())
    published = load_file(two / f"{STEPS}.safetensors")
    saved = config.model_copy(update={"model": config.model.model_copy(update={"path": str(two / "model")})})
    engine = TorchEngine(saved.model_settings, saved.learner.optim, STEPS)
    engine.prepare()
    engine.load(two)
    engine.updates.masters.round_into_parameters()
    for name, tensor in engine.published_state():
        assert torch.equal(tensor, published[name])
    if "critic" in config.algorithm.needs:
        critic = Critic(saved.critic_settings, saved.critic, STEPS)
        critic.prepare()
        critic.load(two / "critic")


def check_adapter(config: RunConfig, one: Path, two: Path) -> None:
    """One process restores the ranks' adapter and moments, and both exports have it."""
    published = load_file(two / f"{STEPS}.safetensors")
    engine = TorchEngine(config.model_settings, config.learner.optim, STEPS)
    engine.prepare()
    engine.load_published(published.items())
    engine.load(two)
    for name, tensor in engine.published_state():
        assert torch.equal(tensor, published[name])
    mine, theirs = (load_file(folder / "model" / ADAPTER_WEIGHTS) for folder in (one, two))
    for name, tensor in theirs.items():
        assert torch.equal(tensor, published[name]), name
        torch.testing.assert_close(tensor, mine[name], rtol=2e-2, atol=1e-3)


@pytest.mark.usefixtures("one_thread")
def test_steps_after_a_checkpoint_are_the_same_on_any_number_of_ranks(two_ranks: TwoRanks, tmp_path: Path) -> None:
    """A checkpoint of two ranks on one and without ranks, and one without ranks on two: masters, moments, critic and a
    moving reference."""
    cases = ("critic and reference, bf16", "moving reference")
    divided = {name: two_ranks.configs[name] for name in cases}
    alone = {name: in_one_process(config) for name, config in divided.items()}
    of_two, of_one = ({name: folder / name for name in cases} for folder in (two_ranks.folder, tmp_path / "one"))
    for name in cases:
        assert list((of_two[name] / "engine").glob("shard-00002-*")), "rank 1 has written its parts"
        of_one[name].parent.mkdir(exist_ok=True)
        take_steps(alone[name], of_one[name], ALONE, STEPS)
        assert not (of_one[name] / "engine").exists()
    found = {
        "two on one": run_ranks(tmp_path / "two on one", divided, steps=STEPS, starts=of_two, size=1),
        "one on two": run_ranks(tmp_path / "one on two", divided, steps=STEPS, starts=of_one),
    }
    for name, config in alone.items():
        tolerance = TOLERANCE[config.model.dtype]
        whole = take_steps(config, tmp_path / f"{name}, unbroken", ALONE, 2 * STEPS)["metrics"][STEPS:]
        found["two on none"] = {name: take_steps(config, tmp_path / name, ALONE, STEPS, of_two[name])}
        for way, results in found.items():
            for mine, theirs in zip(whole, results[name]["metrics"], strict=True):
                assert theirs == pytest.approx(mine, rel=tolerance, abs=tolerance, nan_ok=True), f"{name}: {way}"


def test_a_rank_that_is_killed_costs_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    check_run_with_a_killed_rank(make_config, tmp_path, RANKS, steps=10, at=lambda run: steps_of(run) >= 3)


def check_run_with_a_killed_rank(
    make_config: MakeConfig,
    tmp_path: Path,
    learner: Mapping[str, Any],
    *,
    steps: int,
    at: Callable[[Path], bool],
    trainer: Mapping[str, Any] | None = None,
) -> Path:
    """Kill rank 1 once that is so of the run: each sample is trained once, and one process goes on from the last
    checkpoint. Returns the run's directory."""
    config = make_config(
        learner={"max_staleness": 1, **learner},
        trainer={**(trainer or {}), "max_steps": steps, "save_freq": 2, "samples_per_step": 1},
        network={"timeout_s": 10.0},
    )
    run, log = Path(config.run_dir), tmp_path / "train.log"
    train = start_command("train", str(write_config(config, tmp_path / "given")), log=log)
    try:
        wait_until(lambda: rank_of(train.pid, 1) is not None, "rank 1", timeout_s=120)
        second = rank_of(train.pid, 1)
        assert second
        wait_until(lambda: at(run), "the time to kill rank 1", timeout_s=120)
        second.kill()
        assert train.wait(timeout=180) == 0, f"{log.read_text()}\n{logs(run)}"
    finally:
        train.kill()
    said = "rank 1 was killed by SIGKILL: the learner ends, since its ranks go on together or not at all"
    assert f"{said}); restart 1 of" in " ".join(log.read_text().split()), log.read_text()
    assert "learner 1" in log.read_text(), "started again once"
    with sqlite3.connect(run / JOURNAL_FILE) as db:
        rows = db.execute("SELECT step, ticket_id FROM consumption").fetchall()
    assert len({ticket for _, ticket in rows}) == len(rows) == steps * config.batch.prompts_per_step
    lines = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    # Without ranks, from the same checkpoint.
    alone = (
        "learner.engine=torch",
        "learner.num_processes=1",
        f"trainer.max_steps={steps + 1}",
    )
    again = start_command("train", str(run / "config.yaml"), "--resume", *alone, log=log)
    assert again.wait(timeout=120) == 0, f"{log.read_text()}\n{logs(run)}"
    assert steps_of(run) == steps + 1
    return run


def steps_of(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0
