"""The settings that a resumed run must have again, because the steps that it makes again depend on them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest

from asyncrl.config.load import dump_config, load_config
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.run_inputs import RecordedUpdate, recorded_updates, scoring_fingerprints, scoring_settings
from asyncrl.journal.writer import Journal, TicketSlot
from asyncrl.launch.train import train
from asyncrl.processing.processor import PromptProcessor
from asyncrl.run_folder.contents import checkpoint_folder
from learner.loop.checkpoint import STATE_FILE, LearnerState, newest_checkpoint, read_state, write_checksums
from learner.loop.resume import (
    ROW_DIGESTS,
    StartingPoint,
    check_input_changes,
    check_lasting,
    find_start,
    input_settings,
    lasting_settings,
    scoring_changes,
    sign_journal,
    update_settings,
)
from learner.tickets.ticket_writer import ANSWERS, HELD_OUT, PROMPTS, USABLE, TicketWriter

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
    sign_journal(StartingPoint(), journal, {}, update_settings(config), {}, [])
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
        sign_journal(start, start.journal, {}, update_settings(changed), {}, [])
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


# --- rows and rewards -------------------------------------------------------------------------------


class Rows:
    """Fingerprints of rows, in the place of a ticket writer."""

    def __init__(self, **changed: str) -> None:
        self.changed = changed
        self.settings: Any = None

    def of(self, config: RunConfig) -> TicketWriter:
        self.settings = config.ticket_settings
        return cast(TicketWriter, self)

    def fingerprints(self) -> dict[str, str]:
        return {USABLE: "u", PROMPTS: "p", ANSWERS: "a", HELD_OUT: "h", **self.changed}


@pytest.fixture
def rewarded(make_config: Callable[..., RunConfig], tmp_path: Path) -> RunConfig:
    """A run with a reward of the user's own, whose file imports another one, and a template beside a setting."""
    (tmp_path / "rw.py").write_text("from parts import helper\ndef length(sample, **kwargs): return helper(sample)\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("from .inner import helper\n")
    (tmp_path / "parts" / "inner.py").write_text("def helper(sample): return 1.0\n")
    (tmp_path / "unrelated.py").write_text("")
    (tmp_path / "judge.txt").write_text("How good is it?")
    entry = {"function": f"{tmp_path}/rw.py:length", "kwargs": {"prompt": f"{tmp_path}/judge.txt"}}
    config = make_config(reward={"functions": [entry]})
    config.run_path.mkdir(parents=True)
    with closing(Journal(config.run_path / JOURNAL_FILE)) as journal:
        inputs = input_settings(Rows().of(config), config.reward)
        sign_journal(StartingPoint(), journal, {}, update_settings(config), inputs, [])
    return config


def go_on(
    config: RunConfig, rows: Rows, *overrides: str, accept: bool = False
) -> tuple[list[RecordedUpdate], str, int]:
    """Resume as a learner does. Returns the journal's inputs then, the warning, and how often the scoring changed."""
    file = config.run_path.parent / "config.yaml"
    file.write_text(dump_config(config))
    changed = load_config(file, overrides)
    with closing(Journal(config.run_path / JOURNAL_FILE)) as journal:
        saved = newest_checkpoint(config.run_path)
        start = StartingPoint(journal, saved, read_state(saved) if saved else None)
        inputs = input_settings(rows.of(changed), changed.reward)
        warning = check_input_changes(start, inputs, accept=accept)
        sign_journal(start, journal, {}, update_settings(changed), inputs, [])
        return recorded_updates(journal, "inputs"), warning, scoring_changes(journal)


def edit(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


CHANGES: dict[str, tuple[Callable[[Path], object], Rows, str, str]] = {
    "answers": (lambda _: None, Rows(**{ANSWERS: "x"}), "", f"{ANSWERS} was a, is x"),
    "held-out rows": (lambda _: None, Rows(**{HELD_OUT: "x"}), "", f"{HELD_OUT} was h, is x"),
    "source": (
        edit("rw.py", "def length(sample, **kwargs): return 2"),
        Rows(),
        "",
        "length: rw.py, or a file that it imports, is not what it was\\.",
    ),
    "an imported file": (
        edit("parts/inner.py", "helper = len"),
        Rows(),
        "",
        "length: rw.py, or a file that it imports, is not what it was\\.",
    ),
    "a file of its kwargs": (
        edit("judge.txt", "How bad?"),
        Rows(),
        "",
        "length: the file of its argument prompt is not what it was\\.",
    ),
    "weight": (lambda _: None, Rows(), "reward.functions.0.weight=2", "component length: weight was 1.0, is 2.0\\."),
    "kwargs": (lambda _: None, Rows(), "reward.functions.0.kwargs={}", "component length: kwargs was .*, is None"),
    "name": (
        lambda _: None,
        Rows(),
        "reward.functions.0.name=slow",
        "reward component slow is new; reward component length is gone\\.",
    ),
    "one more": (lambda _: None, Rows(), "reward.functions+=[{function: exact_match}]", "exact_match is new"),
    "length": (lambda _: None, Rows(), "data.max_response_length=9", "data.max_response_length was 8, is 9"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_rows_and_rewards_are_refused_or_accepted_and_journaled(
    rewarded: RunConfig, tmp_path: Path, name: str
) -> None:
    change, rows, override, said = CHANGES[name]
    make_step(rewarded, 1, save=True)
    edit("unrelated.py", "x = 1")(tmp_path)
    before, warning, _ = go_on(rewarded, Rows())
    assert ([one.after_step for one in before], warning) == ([0], ""), "nothing has changed"
    change(tmp_path)
    overrides = override.split("\n") if override else []
    with pytest.raises(UserError, match=rf"{said}.* Undo it, or add --accept-changes"):
        go_on(rewarded, rows, *overrides)
    recorded, warning, scorings = go_on(rewarded, rows, *overrides, accept=True)
    assert [one.after_step for one in recorded] == [0, 1]
    assert warning.startswith("steps after 1 are of other inputs: ")
    assert scorings == (name != "answers"), "of training rows, which score no held-out ones"
    assert go_on(rewarded, rows, *overrides) == (recorded, "", scorings), "accepted once for all"


@pytest.mark.parametrize("name", ["prompts", *CHANGES])
def test_steps_that_are_made_again_are_of_the_rows_that_they_were_made_of(
    rewarded: RunConfig, tmp_path: Path, name: str
) -> None:
    """Their groups have their rewards, so that these may change, and those of other prompts are left out. The loss may
    depend on the longest completion."""
    prompts = (lambda _: None, Rows(**{PROMPTS: "x"}), "", "")
    change, rows, override, _ = {**CHANGES, "prompts": prompts}[name]
    make_step(rewarded, 1)
    change(tmp_path)
    if name != "length":
        assert len(go_on(rewarded, rows, *filter(None, [override]), accept=True)[0]) == 2
        return
    with pytest.raises(UserError, match=r"--accept-changes cannot take .*: steps 1 to 1 have no checkpoint"):
        go_on(rewarded, rows, *filter(None, [override]), accept=True)


def test_other_rewards_are_refused_before_rows_are_looked_at(rewarded: RunConfig, tmp_path: Path) -> None:
    """By the launcher, too, before a service starts: neither has a processor, a survey or a model."""
    make_step(rewarded, 1)
    (tmp_path / "judge.txt").write_text("How bad?")
    said = "length: the file of its argument prompt is not what it was.* or add --accept-changes"
    with ExitStack() as resources, pytest.raises(UserError, match=said):
        find_start(rewarded, resume=True, resources=resources)
    with pytest.raises(UserError, match=said):
        train(rewarded, resume=True)
    with ExitStack() as resources:
        assert find_start(rewarded, resume=True, resources=resources, accept_changes=True).journal


def test_changed_rows_are_named_where_their_digests_are_kept(rewarded: RunConfig) -> None:
    asked = {**input_settings(Rows().of(rewarded), rewarded.reward), ANSWERS: "x"}
    with closing(Journal(rewarded.run_path / JOURNAL_FILE)) as journal:
        start, name_rows = StartingPoint(journal), lambda before: f"rows.parquet:{before[0]}"
        with pytest.raises(UserError, match=rf"{ANSWERS} was a, is x\."):
            check_input_changes(start, asked, accept=False, name_rows=name_rows)
        (rewarded.run_path / ROW_DIGESTS).write_bytes(b"\x07")
        with pytest.raises(UserError, match=rf"{ANSWERS} was a, is x \(rows.parquet:7\)\."):
            check_input_changes(start, asked, accept=False, name_rows=name_rows)


def test_lasting_settings_are_compared_as_soon_as_they_are_known(tmp_path: Path) -> None:
    """Those of an adapter come with the model; all others are refused without it."""
    whole = {"trainer.seed": 1, "model.lora.target_modules": "q", "base weights": "b"}
    with closing(Journal(tmp_path / JOURNAL_FILE)) as journal:
        journal.set_meta(settings=json.dumps(whole))
        check_lasting(journal, {"trainer.seed": 1})
        with pytest.raises(UserError, match=r"trainer.seed was 1, is 2\. All groups"):
            check_lasting(journal, {"trainer.seed": 2})
        with pytest.raises(UserError, match="base weights was b, is c"):
            check_lasting(journal, {**whole, "base weights": "c"})


@pytest.mark.parametrize("name", ["source", "an imported file", "a file of its kwargs", "weight", "kwargs"])
def test_a_server_that_would_score_by_something_else_is_told_apart(
    rewarded: RunConfig, tmp_path: Path, name: str
) -> None:
    """As one that starts again in the middle of a run, and reads its files anew. Files lie where they like."""
    mine = dict(scoring_fingerprints(scoring_settings(rewarded.reward, rewarded.environment)))
    change, _, override, said = CHANGES[name]
    change(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(rewarded))
    reward = load_config(file, [override] if override else []).reward
    its = scoring_fingerprints(scoring_settings(reward, rewarded.environment))
    differ = [part for part, fingerprint in its if mine.get(part, fingerprint) != fingerprint]
    assert len(differ) == 1
    assert differ[0].removeprefix("reward component ") in said or differ == ["reward.functions"]


def test_answers_that_decide_the_tickets_never_change(make_config: Callable[..., RunConfig]) -> None:
    """They order the rows here; with demonstrations they are in the completions (tests/plugins/demonstrations)."""
    plain, ordered = make_config(), make_config(data={"curriculum": {"order_by": "level"}})
    processor = PromptProcessor(plain.model)
    lasting = [set(lasting_settings(one, Ordered().of(one), processor)) for one in (plain, ordered)]
    asked = [set(input_settings(Ordered().of(one), one.reward)) for one in (plain, ordered)]
    assert lasting[1] - lasting[0] == asked[0] - asked[1] == {ANSWERS}


class Ordered(Rows):
    num_train_rows = 4
