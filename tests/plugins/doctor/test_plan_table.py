"""`asyncrl doctor --plan`: the memory table, and the settings that make a plan fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli import main as asyncrl
from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig, changed
from asyncrl.errors import ExitCode
from asyncrl.memory_plan import GIB, lines
from asyncrl.memory_plan.plan import check_plan, make_plan
from asyncrl_plugins.doctor.advice import advice
from benchmarks import random_models
from benchmarks.random_models import make_model
from tests.unit.asyncrl.test_memory_plan import planned
from tests.unit.asyncrl.test_memory_plan_ranks import FEW, HEAVY, config_of

MakeConfig = Callable[..., RunConfig]


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", "tiny")


def test_the_settings_that_help_are_named_by_effect(make_config: MakeConfig, small: Path) -> None:
    sections: dict[str, dict[str, Any]] = {
        "data": {"max_response_length": 512},
        "batch": {"tokens_per_microbatch": 8192},
        "gpu_memory": {"budget_gib": 1.3},
        "trainer": {"mode": "sync"},
    }
    config = planned(make_config, small, learner={"device": "auto"}, rollout={"device": "auto"}, **sections)
    text = "\n".join(advice(make_plan(config)))
    assert "What to change, largest first:" in text
    levers = [line.split("=")[0].strip() for line in text.splitlines() if " -> " in line]
    assert {"batch.tokens_per_microbatch", "model.dtype", "learner.gradient_checkpointing"} <= set(levers)
    units = {"MiB": 1 / 1024, "GiB": 1.0}
    reached = [float(left) * units[unit] for left, unit in re.findall(r" -> (\S+) (\wiB) too much", text)]
    assert reached == sorted(reached), "the one that helps most comes first"
    assert "Together" in text


def test_doctor_prints_the_table_of_a_folder_and_of_a_configuration(
    make_config: MakeConfig,
    small: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["doctor", "--plan", str(small), "gpu_memory.budget_gib=80"]
    monkeypatch.setenv("ASYNCRL_GPUS", "0,1")
    assert asyncrl(words) == 0
    assert "two devices" in (apart := capsys.readouterr().out)
    assert "ASYNCRL_GPUS" not in apart
    monkeypatch.setenv("ASYNCRL_GPUS", "")
    assert asyncrl(words) == 0
    assert "ASYNCRL_GPUS=0,1 before this command plans for 2 GPUs" in (table := capsys.readouterr().out)
    assert {"KV cache", "AdamW moments"} <= set(re.findall(r"^  (\S+ \S+)  ", table, re.M))
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(planned(make_config, small, trainer={"mode": "sync"})))
    assert asyncrl(["doctor", "--plan", str(file), "gpu_memory.budget_gib=4"]) == 0
    table = capsys.readouterr().out
    for line in (
        "LEARNER AWAKE",
        "ENGINE AWAKE",
        "HOST MEMORY",
        "learner asleep",
        "Fits gpu_memory.budget_gib=4, with",
    ):
        assert line in table
    assert asyncrl(["doctor", "--plan", str(file), "gpu_memory.budget_gib=0.005"]) == ExitCode.USER_ERROR
    assert "DOES NOT FIT gpu_memory.budget_gib=0.005" in capsys.readouterr().out


def test_a_budget_that_one_device_exceeds_is_met_by_ranks(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advice names as few ranks as fit by themselves, and what they need beside."""
    monkeypatch.setattr(lines, "NCCL_BYTES", 0)  # more than the whole model here
    monkeypatch.setitem(random_models.SIZES, "heavy", HEAVY)
    heavy = make_model(tmp_path / "heavy", "heavy")
    whole = changed(
        config_of(make_config, heavy, FEW, {"learner": {"engine": "torch", "num_processes": 1}}),
        {"learner.device": "cuda:0", "rollout.device": "cuda:1"},
    )
    divided = {"learner.engine": "fsdp2", "learner.device": "cuda", "learner.num_processes": 4}
    needed = make_plan(changed(whole, divided)).phases[0].nbytes
    tight = make_plan(changed(whole, {"gpu_memory.budget_gib": (needed + 1) / GIB}))
    assert tight.excess
    said = "\n".join(advice(tight))
    assert re.search(r"learner\.engine=fsdp2 learner\.device=cuda learner\.num_processes=4 .* -> 0 too much", said)
    fits = changed(whole, {**divided, "gpu_memory.budget_gib": tight.budget / GIB})
    assert not make_plan(fits).excess
    assert check_plan(RunConfig.model_validate(fits.model_dump())) is not None, "a budget is accepted of ranks"


def test_the_plan_is_for_this_machine_and_says_what_a_gpu_would_change(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_GPUS", "")
    for words, dtype, says in (
        ([], "float32", True),
        (["model.dtype=bfloat16"], "bfloat16", False),
        (["learner.device=cuda", "rollout.device=cuda"], "bfloat16", False),
        (["learner.device=cpu"], "float32", False),
    ):
        assert asyncrl(["doctor", "--plan", str(small), *words]) == 0
        table = capsys.readouterr().out
        assert f"parameters in {dtype}" in table
        assert ("which has no GPU. For a run on one: model.dtype=bfloat16" in table) == says, words


@pytest.mark.parametrize("name", ["org/tiny", "org/tiny@v1.0"])
def test_a_model_of_the_hub_is_planned_without_its_weights(
    small: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repository, revision, any("safetensors" in pattern for pattern in allow_patterns)))
        return str(small)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert asyncrl(["doctor", "--plan", name]) == 0
    assert "AdamW moments" in capsys.readouterr().out
    assert asked == [("org/tiny", "v1.0" if "@" in name else None, False)]


@pytest.mark.parametrize("sizes", [(1, 2, 16), (2, 4, 8), (3, 1, 64)])
def test_no_more_tokens_are_planned_than_a_step_has(
    make_config: MakeConfig, small: Path, sizes: tuple[int, int, int]
) -> None:
    prompts, group, response = sizes
    most = prompts * (64 + group * response)

    def working(tokens: int) -> int:
        config = planned(
            make_config,
            small,
            data={"max_response_length": response},
            batch={"prompts_per_step": prompts, "group_size": group, "tokens_per_microbatch": tokens},
            algorithm={"adv_estimator": "reinforce_plus_plus"} if group == 1 else {},
        )
        return next(line.nbytes for line in make_plan(config).phases[0].lines if line.name == lines.WORKING)

    assert working(most) == working(100 * most)
    assert working(most) > working(64 + response)
