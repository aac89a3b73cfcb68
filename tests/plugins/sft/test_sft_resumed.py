"""Checkpoints and evaluations of warm starts: a run that was killed makes what it would have made."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl import plugins
from asyncrl.cli import main
from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig, changed
from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError
from asyncrl.processing.processor import PromptProcessor
from asyncrl.run_folder.contents import checkpoint_folders
from asyncrl_plugins.sft import run as module
from asyncrl_plugins.sft.continuing import find_saved
from asyncrl_plugins.sft.evaluation import Evaluations
from asyncrl_plugins.sft.run import SupervisedRun
from asyncrl_plugins.sft.settings import settings_of
from asyncrl_plugins.sft.trainer import SupervisedTrainer
from learner.loop.clean_stop import StopAsked
from tests.rigs.adapters import lora_config
from tests.system.test_end_to_end import lines

MakeConfig = Callable[..., RunConfig]
STEPS = 4
PROCESS = ("time", "rss_gib", "vision/reused")
"""Numbers that are a process's own: clocks, memory, features that it has kept."""


class Killed(BaseException):
    """Ends a run at once, as SIGKILL does: nothing of it is written any more."""


@cache
def shared_processor(path: str) -> PromptProcessor:
    return PromptProcessor(ModelConfig(path=path), cache_mib=16)


@pytest.fixture(autouse=True)
def one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a test share their processor, which takes longer to load than their steps."""
    monkeypatch.setattr(module, "prompt_processor", lambda model, *_, **__: shared_processor(model.path))


def config_of(make: Callable[..., RunConfig], data: Path, **settings: Any) -> RunConfig:
    sft = {"steps": STEPS, "rows_per_step": 4, "optim": {"lr": 1e-2, "lr_scheduler_type": "linear"}, **settings}
    rows = {"train_files": [str(data / "sft.parquet")], "max_train_rows": 12, "max_val_rows": 4}
    return make(data=rows, sft=sft, evaluation={"before_training": True, "by": "kind"})


def run(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, kill_at: int = 0, *, stop_at: int = 0, resume: bool = False
) -> None:
    """Run to the end, or until the learner is killed or told to stop within a step."""
    learn = SupervisedTrainer.learn

    def dying(self: SupervisedTrainer, step: int, rows: Any) -> dict[str, float]:
        if step == kill_at:
            raise Killed
        if step == stop_at:
            signal.raise_signal(signal.SIGTERM)
        return learn(self, step, rows)

    with monkeypatch.context() as patch:
        patch.setattr(SupervisedTrainer, "learn", dying)
        torch.manual_seed(config.trainer.seed)  # as its process does
        supervised = SupervisedRun(config, saved=find_saved(config.run_path) if resume else None)
        try:
            supervised.run()
        except (Killed, StopAsked):
            assert kill_at or stop_at


def recorded(folder: Path, name: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in PROCESS} for line in lines(folder / name)]


def same_weights(one: RunConfig, other: RunConfig, folder: str, name: str) -> bool:
    mine, theirs = (load_file(each.run_path / folder / name) for each in (one, other))
    return mine.keys() == theirs.keys() and all(torch.equal(tensor, theirs[key]) for key, tensor in mine.items())


def test_a_run_that_was_stopped_and_killed_continues_exactly(
    make_config: MakeConfig, digits_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter and a whole connector in bf16, so that weights, moments and masters are continued. It is told to stop
    within its first step, and later killed after an evaluation that follows its checkpoint: that is made again."""
    lora = {"rank": 4, "modules_to_save": ["connector"]}
    make: Any = partial(lora_config, make_config, lora, reward={"functions": []}, environment={})
    whole = config_of(make, digits_data, save_freq=2, evaluate_every=3)
    whole = changed(whole, {"model.dtype": "bfloat16", "trainer.save_limit": 1, "run_dir": str(tmp_path / "whole")})
    killed = changed(whole, {"run_dir": str(tmp_path / "killed")})
    run(whole, monkeypatch)
    run(killed, monkeypatch, stop_at=1)
    assert list(checkpoint_folders(killed.run_path)) == [1], "whatever sft.save_freq is"
    run(killed, monkeypatch, kill_at=4, resume=True)
    assert list(checkpoint_folders(killed.run_path)) == [2]
    run(killed, monkeypatch, resume=True)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert recorded(killed.run_path, name) == recorded(whole.run_path, name)
    assert [record["step"] for record in recorded(killed.run_path, "evaluations.jsonl")] == [0, 3, 4]
    assert list(checkpoint_folders(killed.run_path)) == [STEPS], "no more than trainer.save_limit"
    assert all(same_weights(killed, whole, folder, "adapter_model.safetensors") for folder in ("export", "best"))


def test_what_a_continued_run_needs_is_said(
    make_config: MakeConfig,
    digits_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Other rows or settings, a folder without a run, one with a run, and an end without a checkpoint."""
    config = changed(config_of(make_config, digits_data, save_freq=1), {"model.dtype": "float32"})
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert main(["sft", str(file), "--resume"]) == 2
    assert "--resume: there is no supervised run in" in capsys.readouterr().err
    run(config, monkeypatch, kill_at=2)
    assert main(["sft", str(file)]) == 2
    assert "holds a supervised run. Continue it with --resume" in capsys.readouterr().err
    settings = {**settings_of(config).model_dump(), "rows_per_step": 8}
    other = config_of(make_config, digits_data, **settings)
    with pytest.raises(UserError, match=r"usable training rows was .*sft\.rows_per_step was 4 and is 8"):
        run(changed(other, {"model.dtype": "float32", "data.max_train_rows": 8}), monkeypatch, resume=True)
    shutil.rmtree(config.run_path / "checkpoints")
    assert find_saved(config.run_path) is None
    (config.run_path / "export").mkdir()
    with pytest.raises(UserError, match=r"is finished .* has no checkpoint to go on from"):
        find_saved(config.run_path)


def test_completions_that_nothing_can_score_are_refused_before_the_run(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without an evaluator a run may evaluate its loss alone."""
    found = plugins.installed
    monkeypatch.setattr(plugins, "installed", lambda group: {} if group == "evaluators" else found(group))
    config = make_config(sft={"evaluate_every": 2})
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert main(["sft", str(file)]) == 2
    assert "(reward.functions=[] gives losses alone) needs an evaluator" in capsys.readouterr().err
    assert not (config.run_path / "status.json").exists()


def test_nothing_to_evaluate_is_refused(make_config: MakeConfig) -> None:
    config = make_config(data={"val_files": []}, sft={"evaluate_every": 2})
    processor: Any = None
    with pytest.raises(UserError, match=r"sft\.evaluate_every is 2, and data\.val_files is empty"):
        Evaluations(config, processor)
    wrong = make_config(
        data={"target_key": "no such"}, sft={"evaluate_every": 2}, reward={"functions": []}, environment={}
    )
    with pytest.raises(UserError, match="no held-out row has a column 'no such'"):
        Evaluations(wrong, processor)
