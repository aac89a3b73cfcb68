"""The settings that a resumed run must have again, because the steps that it makes again depend on them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from asyncrl.config.load import dump_config, load_config
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.writer import Journal
from learner.resume import StartingPoint, find_start, sign_journal, update_settings

LOSS = "from asyncrl.algorithms.losses import ppo as loss"


@pytest.fixture
def begun(make_config: Callable[..., RunConfig], tmp_path: Path) -> RunConfig:
    """A run with a journal, a learning rate that falls over it, and a loss of the user's own."""
    (tmp_path / "mine.py").write_text(LOSS)
    config = make_config(
        algorithm={"policy_loss": f"{tmp_path}/mine.py:loss"},
        learner={"optim": {"lr": 1e-3, "lr_scheduler_type": "linear"}},
    )
    config.run_path.mkdir(parents=True)
    journal = Journal(config.run_path / JOURNAL_FILE)
    sign_journal(StartingPoint(), journal, {}, update_settings(config), [])
    journal.close()
    return config


def resume(config: RunConfig, *overrides: str) -> None:
    file = config.run_path.parent / "config.yaml"
    file.write_text(dump_config(config))
    with ExitStack() as resources:
        find_start(load_config(file, overrides), resume=True, resources=resources)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm.clip_ratio_high=0.3", "algorithm.clip_ratio_high was 0.28, is 0.3"),
        ("algorithm.correction.masks=[{kind: veto}]", "algorithm.correction.masks was [], is [{'kind': 'veto',"),
        ("learner.optim.lr=1e-4", "learner.optim.lr was 0.001, is 0.0001"),
        ("model.freeze_vision_tower=true", "model.freeze_vision_tower was False, is True"),
        ("trainer.max_steps=9", "trainer.max_steps was 3, is 9"),
    ],
)
def test_another_update_is_refused_before_anything_is_loaded(begun: RunConfig, override: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        resume(begun, override)
    assert said in str(refused.value)
    assert (
        f"Resume with the same values, or start a new run from the checkpoint's model: asyncrl export {begun.run_dir}"
        in str(refused.value)
    )


def test_another_loss_under_the_same_name_is_refused(begun: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOSS.replace("ppo", "dppo"))
    with pytest.raises(UserError, match=r"fingerprint of mine\.py was \w+, is \w+"):
        resume(begun)


def test_what_makes_no_step_different_may_change(begun: RunConfig) -> None:
    resume(
        begun,
        *("trainer.save_freq=7", "telemetry.learner_port=0", "telemetry.log_level=DEBUG", "network.timeout_s=9"),
        *("batch.tokens_per_microbatch=1024", "learner.gradient_checkpointing=true", "learner.cpu_threads=2"),
        *("evaluation.every_steps=5", "reward.timeout_s=3"),
    )
