"""A damaged checkpoint: an older one takes its place while the journal keeps the groups of all steps since."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.writer import Journal, TicketSlot
from asyncrl.run_folder.contents import MODEL_FOLDER, checkpoint_folder
from learner.loop.checkpoint import STATE_FILE, LearnerState, Snapshot, save_checkpoint
from learner.loop.resume import StartingPoint, find_start, sign_journal, update_settings
from protocol.codec import encode
from tests.rigs.fuzz import content

torch = pytest.importorskip("torch")


@pytest.fixture
def stopped(make_config: Callable[..., RunConfig]) -> RunConfig:
    """A run that stopped after step 5, with checkpoints of steps 2 and 4; the journal keeps all groups."""
    config = make_config()
    config.run_path.mkdir(parents=True)
    with closing(Journal(config.run_path / JOURNAL_FILE)) as journal:
        run_id = sign_journal(StartingPoint(), journal, {}, update_settings(config), {}, [])
        for step in range(1, 6):
            slot = TicketSlot(step - 1, step - 1, step - 1, 0)
            with journal.transaction():
                journal.add_tickets([slot])
                journal.add_group(slot.ticket_id, encode(content.group(slot.ticket_id, step - 1, "a")))
                journal.consume(step, [slot])
                journal.count(issued=1, next_id=1, next_position=1, trained=1)
    for step in (2, 4):
        save(config, step, run_id)
    return config


def save(config: RunConfig, step: int, run_id: str = "") -> None:
    building = checkpoint_folder(config.run_path, step).with_name(".building")
    building.mkdir(parents=True)

    def model(folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights of step %d" % step)

    state = LearnerState(step, step, "", run_id)
    save_checkpoint(config.run_path, building, Snapshot(state, torch.get_rng_state(), MODEL_FOLDER, model, {}), keep=2)


def flip(folder: Path) -> None:
    (folder / MODEL_FOLDER / "model.safetensors").write_bytes(b"weights of step 9")


def cut_short(folder: Path) -> None:
    (folder / "random.pt").write_bytes(b"")


def remove_weights(folder: Path) -> None:
    shutil.rmtree(folder / MODEL_FOLDER)


def remove_state(folder: Path) -> None:
    (folder / STATE_FILE).unlink()


def remove_checksums(folder: Path) -> None:
    (folder / "checksums.json").write_text("{")


DAMAGES = (flip, cut_short, remove_weights, remove_state, remove_checksums)


def start_of(config: RunConfig, resources: ExitStack) -> StartingPoint:
    return find_start(config, resume=True, resources=resources)


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_older_checkpoint_takes_the_place_of_a_damaged_one_and_that_is_said(
    stopped: RunConfig, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    newest, older = (checkpoint_folder(stopped.run_path, step) for step in (4, 2))
    damage(newest)
    with ExitStack() as resources:
        start = start_of(stopped, resources)
        assert (start.checkpoint, start.state and start.state.step) == (older, 2)
        assert start.journal is not None
        assert [start.journal.group(ticket).ticket_id for ticket in (2, 3, 4)] == [2, 3, 4]
    (said,) = (record.getMessage() for record in caplog.records)
    assert f"{newest} is damaged" in said
    assert f"goes on from {older}, and makes steps 3 to 5 again" in said


def test_a_checkpoint_as_it_was_written_is_used_without_a_word(
    stopped: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    flip(checkpoint_folder(stopped.run_path, 2))
    with ExitStack() as resources:
        assert start_of(stopped, resources).checkpoint == checkpoint_folder(stopped.run_path, 4)
    assert not caplog.records


def test_groups_that_are_gone_are_named(stopped: RunConfig) -> None:
    flip(checkpoint_folder(stopped.run_path, 4))
    with closing(Journal(stopped.run_path / JOURNAL_FILE)) as journal:
        journal.forget_payloads(3)
    refused = (
        r"step-000004 cannot be used: .*An older one cannot take its place: .* no longer keeps all groups of step 3"
    )
    with ExitStack() as resources, pytest.raises(BadStateError, match=refused):
        start_of(stopped, resources)


def test_a_group_that_is_damaged_too_is_named(stopped: RunConfig) -> None:
    flip(checkpoint_folder(stopped.run_path, 4))
    (groups,) = stopped.run_path.glob(f"{JOURNAL_FILE}.groups-*")
    content_ = bytearray(groups.read_bytes())
    content_[len(content_) // 2] ^= 1  # of step 3
    groups.write_bytes(content_)
    with ExitStack() as resources, pytest.raises(BadStateError, match=r"cannot take its place: .*its checksum"):
        start_of(stopped, resources)


def test_no_checkpoint_that_is_whole_stops_the_run(stopped: RunConfig) -> None:
    for step in (2, 4):
        remove_weights(checkpoint_folder(stopped.run_path, step))
    with ExitStack() as resources, pytest.raises(BadStateError, match="step-000004 cannot be used"):
        start_of(stopped, resources)


def test_a_file_of_the_users_in_a_checkpoint_is_no_damage(stopped: RunConfig) -> None:
    (checkpoint_folder(stopped.run_path, 4) / "notes.txt").write_text("mine")
    with ExitStack() as resources, pytest.raises(BadStateError, match=r"not written with it: notes\.txt\. Move it out"):
        start_of(stopped, resources)


def test_the_next_checkpoint_is_not_removed_in_favour_of_the_damaged_one(stopped: RunConfig) -> None:
    flip(checkpoint_folder(stopped.run_path, 4))
    with ExitStack() as resources:
        run_id = start_of(stopped, resources).state.run_id  # pyright: ignore[reportOptionalMemberAccess]
    save(stopped, 3, run_id)
    with ExitStack() as resources:
        assert start_of(stopped, resources).checkpoint == checkpoint_folder(stopped.run_path, 3)
    save(stopped, 4, run_id)
    with ExitStack() as resources:
        assert start_of(stopped, resources).checkpoint == checkpoint_folder(stopped.run_path, 4)
