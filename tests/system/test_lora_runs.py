"""Whole runs that train an adapter: two processes, only adapters between them, killed, resumed, exported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.cli import main
from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.model_files.folder import base_fingerprint
from asyncrl.models.loading import load_model
from asyncrl.models.lora import is_adapter_folder
from asyncrl.models.published import published_tensors
from learner.loop.checkpoint import newest_checkpoint
from learner.service import Learner
from tests.rigs.adapters import CPU, MakeConfig, Weights, lora_config, spec_of
from tests.rigs.plain_accuracy import plain_accuracy
from tests.rigs.small_runs import logs
from tests.rigs.two_processes import run_both, start, with_ports, write_config
from tests.system.test_end_to_end import lines
from tests.system.test_resume import CRASHES, assert_same_run, resume_config, run_killed


def weights(folder: Path | str, config: RunConfig) -> Weights:
    return dict(published_tensors(load_model(config.model.model_copy(update={"path": str(folder)}), device=CPU)))


def adapted(config: RunConfig) -> RunConfig:
    model = config.model.model_copy(update={"lora": config.model.lora.model_copy(update={"rank": 4})})
    return config.model_copy(update={"model": model})


@pytest.mark.slow
def test_a_run_trains_an_adapter_raises_the_reward_and_leaves_the_base_alone(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    config = lora_config(
        make_config,
        {"rank": 4},
        learner={"max_staleness": 2, "optim": {"lr": 2e-2, "weight_decay": 0.0}},
        batch={"prompts_per_step": 8, "group_size": 8, "tokens_per_microbatch": 1024},
        rollout={"weights_channel": "zmq"},
        algorithm={"kl_loss_coef": 1e-3},
        evaluation={"before_training": True, "every_steps": 20},
        trainer={"max_steps": 40, "samples_per_step": 1},
    )
    before = base_fingerprint(config.model)
    assert run_both(config, run) == (0, 0), logs(run)
    assert base_fingerprint(config.model) == before

    steps = lines(run / "metrics.jsonl")
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards
    assert steps[0]["reference_kl"] == pytest.approx(0, abs=1e-6), "the adapter changes nothing at first"
    assert steps[-1]["reference_kl"] > 0.01
    assert all(step["ledger_residual"] == 0 for step in steps)
    base = weights(config.model.path, config)
    adapter_bytes = 4 * 4 * sum(sum(base[f"{layer}.weight"].shape) for layer in spec_of(config).target_modules)
    assert {step["publish_bytes"] for step in steps} == {adapter_bytes}

    trained = weights(run / "export", config)
    assert trained.keys() == base.keys()
    for name, tensor in trained.items():
        change = tensor - base[name]
        if name.removesuffix(".weight") in spec_of(config).target_modules:
            assert 1 <= torch.linalg.matrix_rank(change, rtol=1e-3) <= 4, name
        else:
            assert not change.any(), name

    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None
    assert not list(checkpoint.rglob("model*.safetensors")), "the base is not copied"
    assert main(["export", str(run), str(tmp_path / "merged")]) == 0
    assert main(["export", str(run), str(tmp_path / "adapter"), "--adapter"]) == 0
    assert is_adapter_folder(tmp_path / "adapter")
    again = weights(tmp_path / "merged", config)
    assert all((again[name] - trained[name]).abs().max() < 1e-6 for name in trained)
    last = lines(run / "evaluations.jsonl")[-1]["accuracy"]
    for folder in (run / "export", tmp_path / "merged", tmp_path / "adapter"):
        assert plain_accuracy(config, folder) == pytest.approx(last, abs=1e-9)
    capsys.readouterr()


@pytest.mark.slow
def test_killed_again_and_again_an_adapter_ends_with_the_same_bits(make_config: MakeConfig, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "killed"
    config = adapted(resume_config(make_config, whole))
    assert run_both(config, whole) == (0, 0), logs(whole)
    config = adapted(resume_config(make_config, run))
    run_killed(config, run, CRASHES[-2:])
    assert_same_run(run, whole, config)


@pytest.mark.slow
def test_a_resumed_run_keeps_its_adapter_and_its_base(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, base = tmp_path / "run", tmp_path / "base"
    config = with_ports(adapted(resume_config(make_config, run)))
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"save_async": False})})
    shutil.copytree(config.model.path, base)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(base)})})
    file = write_config(config, run)
    server = start("rollout_server", file)
    try:
        assert start("learner", file, crash_at="step.trained:5").wait(timeout=120) == -9
    finally:
        server.kill()
        server.wait()
    monkeypatch.setattr("learner.training.engine.load_model", lambda *_, **__: pytest.fail("weights were loaded"))

    def refused(*overrides: str) -> str:
        with pytest.raises(UserError) as caught:
            Learner(load_config(file, overrides), resume=True)
        return str(caught.value)

    said = refused("model.lora.rank=8")
    assert "model.lora.rank was 4, is 8; model.lora.alpha was 8, is 16" in said
    assert f"asyncrl export {run} TARGET" in said
    assert "model.lora.rank was 4, is None" in refused("model.lora.rank=0")
    assert "14 layers there, rank 4, alpha 8, 2 layers here" in refused("model.lora.target_modules=[q_proj]")
    change_one_weight(base)
    said = refused()
    assert "belongs to base weights with fingerprint" in said
    assert "Put the base model that the run was started with back" in said

    shutil.rmtree(run / "checkpoints")
    monkeypatch.undo()
    assert "base weights was" in refused(), "the journal knows them, too"
    assert "model.lora.rank was 4, is None" in refused("model.lora.rank=0")


def change_one_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1e-3
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
