"""The settings that a resumed run must have again, because the steps that it makes again depend on them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

import pytest

from asyncrl.config.load import dump_config, load_config
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.writer import Journal, TicketSlot
from asyncrl.run_folder.contents import checkpoint_folder
from learner.loop.checkpoint import STATE_FILE, LearnerState, write_checksums
from learner.loop.resume import (
    RecordedUpdate,
    StartingPoint,
    find_start,
    recorded_updates,
    sign_journal,
    update_settings,
)

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


def resume(config: RunConfig, *overrides: str) -> list[RecordedUpdate]:
    """Begin as a learner does. Returns what the journal says of its settings then."""
    file = config.run_path.parent / "config.yaml"
    file.write_text(dump_config(config))
    with ExitStack() as resources:
        changed = load_config(file, overrides)
        start = find_start(changed, resume=True, resources=resources)
        assert start.journal is not None
        sign_journal(start, start.journal, {}, update_settings(changed), [])
        return recorded_updates(start.journal)


def make_step(config: RunConfig, step: int, *, save: bool = False) -> None:
    """Journal a step of one group, and write a checkpoint of it."""
    with closing(Journal(config.run_path / JOURNAL_FILE)) as journal:
        slot, run_id = TicketSlot(step - 1, step - 1, step - 1, 0), journal.meta("run_id") or ""
        with journal.transaction():
            journal.add_tickets([slot])
            journal.consume(step, [slot])
            journal.count(issued=1, next_id=1, next_position=1, trained=1)
    if save:
        folder = checkpoint_folder(config.run_path, step)
        folder.mkdir(parents=True)
        (folder / STATE_FILE).write_text(json.dumps(asdict(LearnerState(step, step, "", run_id))))
        write_checksums(folder)


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
    """A step has been journaled, and no checkpoint holds it: it is made again."""
    make_step(begun, 1)
    with pytest.raises(UserError) as refused:
        resume(begun, override)
    assert said in str(refused.value)
    assert (
        f"Resume with the same values, or start a new run from the checkpoint's model: asyncrl export {begun.run_dir}"
        in str(refused.value)
    )


def test_another_loss_under_the_same_name_is_refused(begun: RunConfig, tmp_path: Path) -> None:
    make_step(begun, 1)
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


def test_settings_may_change_after_a_checkpoint_of_the_last_step_and_are_recorded(
    begun: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """No step is made again then; a later one is made by what was recorded for it."""
    assert [update.after_step for update in resume(begun)] == [0]
    make_step(begun, 1, save=True)
    make_step(begun, 2, save=True)
    changed = ("learner.optim.lr=1e-4", "algorithm.clip_ratio_high=0.3")
    recorded = resume(begun, *changed)
    assert [(one.after_step, one.settings["learner.optim.lr"]) for one in recorded] == [(0, 1e-3), (2, 1e-4)]
    assert "steps after 2 are made by other settings: " in caplog.text
    assert "learner.optim.lr was 0.001, is 0.0001" in caplog.text
    assert resume(begun, *changed) == recorded, "a resume with the same settings records nothing"
    make_step(begun, 3)
    assert resume(begun, *changed) == recorded
    with pytest.raises(UserError, match=r"learner.optim.lr was 0.0001, is 0.001. Steps 3 to 3 have no checkpoint"):
        resume(begun, "algorithm.clip_ratio_high=0.3")
    shutil.rmtree(checkpoint_folder(begun.run_path, 2))
    with pytest.raises(UserError, match=r"changed after step 2, and the newest checkpoint is of step 1"):
        resume(begun, *changed)


@pytest.mark.parametrize(
    "override", ["model.freeze_vision_tower=true", "algorithm.updates_per_batch=2", "learner.optimizer=adamw_8bit"]
)
def test_what_a_checkpoint_depends_on_never_changes(begun: RunConfig, override: str) -> None:
    make_step(begun, 1, save=True)
    with pytest.raises(UserError, match=r"All steps of a run are made by the same\. Resume with the same values"):
        resume(begun, override)
