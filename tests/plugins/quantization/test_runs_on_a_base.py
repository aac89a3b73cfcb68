"""Whole runs on a base in 4 bits: they learn, take turns on one device, and go on bit for bit after crashes."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig, changed
from asyncrl.errors import UserError
from asyncrl.models.lora import is_adapter_folder, read_adapter
from asyncrl.run_folder.export_record import read_record
from learner.service import Learner
from tests.rigs.adapters import lora_config
from tests.rigs.plain_accuracy import plain_accuracy
from tests.rigs.small_runs import logs
from tests.rigs.two_processes import run_both
from tests.system.test_end_to_end import lines
from tests.system.test_resume import CRASHES, batches, evaluations, recorded, resume_config, run_killed, sampled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
]
MakeConfig = Callable[..., RunConfig]


def test_a_run_raises_the_reward_and_exports_its_policy(make_config: MakeConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = lora_config(
        make_config,
        {"rank": 4},
        learner={"max_staleness": 2, "optim": {"lr": 2e-2, "weight_decay": 0.0}},
        batch={"prompts_per_step": 8, "group_size": 8, "tokens_per_microbatch": 1024},
        algorithm={"kl_loss_coef": 1e-3},
        evaluation={"before_training": True, "every_steps": 20},
        trainer={"max_steps": 40, "samples_per_step": 1},
    )
    config = changed(config, {"model.quantization": "nf4"})
    assert run_both(config, run) == (0, 0), logs(run)
    log = (run / "learner.log").read_text()
    assert "is aligned: log-probs" in log
    assert "(0.001 is accepted" in log, "hf has the learner's own values"
    steps = lines(run / "metrics.jsonl")
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards
    assert steps[0]["reference_kl"] == pytest.approx(0, abs=1e-6), "the adapter changes nothing at first"
    assert steps[-1]["reference_kl"] > 0.01
    assert max(step.get("staleness_0/logprob_diff_max", 0.0) for step in steps) < 1e-3
    record = read_record(run / "export")
    assert record is not None
    assert (record.form, record.base) == ("adapter", f"{config.model.path} rounded to nf4")
    assert is_adapter_folder(run / "export")
    assert "load_in_4bit=True" in (run / "export" / "README.md").read_text()
    last = lines(run / "evaluations.jsonl")[-1]["accuracy"]
    assert plain_accuracy(config, run / "export") == pytest.approx(last, abs=1e-9)


def test_in_turns_or_killed_it_ends_with_the_same_bits(make_config: MakeConfig, tmp_path: Path) -> None:
    """Everything but the adapters, their optimiser state and the journal is made again from the model folder."""
    whole, run = tmp_path / "in turns", tmp_path / "killed"
    settings = {"model.lora.rank": 4, "model.quantization": "nf4"}
    turns = changed(resume_config(make_config, whole), {**settings, "trainer.mode": "sync"})
    assert run_both(turns, whole) == (0, 0), logs(whole)
    run_killed(changed(resume_config(make_config, run), settings), run, CRASHES[-2:])
    for of in (batches, sampled, recorded, evaluations):
        assert of(run) == of(whole)
    mine, theirs = read_adapter(run / "export"), read_adapter(whole / "export")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    with pytest.raises(UserError, match=r"model\.quantization was nf4, is None"):
        Learner(load_config(run / "config.yaml", ["model.quantization=", "trainer.max_steps=9"]), resume=True)
