"""Bad state in real runs: numbers, disks, journals, checkpoints and peers that are wrong end them with a reason."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.database import PAGE_BYTES, JournalReader
from asyncrl.run_folder.failure import read_failure
from learner.loop.checkpoint import newest_checkpoint, write_checksums
from learner.loop.resume import find_start
from protocol.messages import TrajectoryStatus
from tests.conftest import small_config
from tests.rigs.ports import own_port
from tests.rigs.small_runs import (
    PER_STEP,
    STEPS,
    assert_every_prompt_trained_once,
    failure_of,
    logs,
    small,
)
from tests.rigs.tiny import ROOT
from tests.rigs.two_processes import run_both, start, with_ports, write_config
from tests.rigs.waiting import exit_codes

pytestmark = pytest.mark.slow
SAVED = {"max_steps": STEPS, "samples_per_step": PER_STEP, "save_freq": 2}

BAD_LOSS = """
from pathlib import Path
import torch
from asyncrl.algorithms.losses import PolicyLoss

calls = 0
MARK = Path("MARK_PATH")

def nan_at_step_two(tokens, config):
    global calls
    calls += 1
    loss = -tokens.advantages * (tokens.logprobs - tokens.proximal_logprobs)
    if calls == 2 and MARK.exists():
        loss = torch.where(tokens.row == tokens.row.max(), float("nan"), loss)
    return PolicyLoss(loss, {})
"""


def resume_both(run: Path, *overrides: str) -> tuple[int, int]:
    """Exit codes of a learner with --resume and a new server, on the run's own ports."""
    file = run / "config.yaml"
    learner, server = exit_codes([start("learner", file, "--resume", *overrides), start("rollout_server", file)])
    return learner, server


# --- numbers ----------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_the_run_and_another_loss_is_refused_on_resume(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Bad gradients: tests/unit/learner/test_step.py."""
    run, file, mark = tmp_path / "run", tmp_path / "loss.py", tmp_path / "is bad"
    file.write_text(BAD_LOSS.replace("MARK_PATH", str(mark)))
    mark.touch()
    config = small(make_config, algorithm={"policy_loss": f"{file}:nan_at_step_two"})
    assert run_both(config, run) == (3, 4), logs(run)
    failure = failure_of(run)
    assert (failure.service, failure.kind, failure.step) == ("learner", "bad_state", 1)
    assert "step 2 (policy version 1), update 1 of 1" in failure.reason
    for part in ("the loss is nan", "the policy loss is not finite at", "completion 3"):
        assert part in failure.reason
    assert "the learner failed" in (run / "rollout_server.log").read_text()

    learner = start("learner", run / "config.yaml", "--resume", "algorithm.policy_loss=ppo")
    assert exit_codes([learner]) == [2], "the steps that are made again would not be the same"
    assert "algorithm.policy_loss" in (run / "learner.log").read_text()
    mark.unlink()
    assert resume_both(run) == (0, 0), logs(run)
    assert_every_prompt_trained_once(run)
    assert read_failure(run) is None


# --- rewards ----------------------------------------------------------------------------------------


def test_a_reward_that_scores_nothing_stops_the_run_with_its_reason_and_one_that_is_mended_lets_it_go_on(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    run, file, judge = tmp_path / "run", tmp_path / "reward.py", tmp_path / "judge"
    body = f"    if not Path({str(judge)!r}).exists():\n        raise OSError('the judge is away')\n    return 1.0\n"
    file.write_text(f"from pathlib import Path\n\n\ndef asked(sample):\n{body}")
    config = small(make_config, reward={"functions": [{"function": f"{file}:asked"}]})
    assert run_both(config, run) == (3, 4), logs(run)
    failure = failure_of(run)
    assert (failure.service, failure.kind) == ("learner", "bad_state")
    assert "groups in a row has a score" in failure.reason
    assert re.search(r"says reward_exception: .*OSError: the judge is away \(reward.py:6 in asked\)", failure.reason)
    judge.touch()
    assert resume_both(run) == (0, 0), logs(run)
    assert_every_prompt_trained_once(run)
    told = json.loads((run / "status.json").read_text())["unscored"]
    assert "the judge is away" in told, "of the steps that were made without a score"


# --- environments -----------------------------------------------------------------------------------


def test_a_dead_search_service_stops_the_run_and_none_of_its_trajectories_has_a_score(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    run, url = tmp_path / "run", f"http://127.0.0.1:{own_port()}/retrieve"
    config = make_config(
        environment={
            "name": f"{ROOT / 'tests' / 'rigs' / 'searcher.py'}:Searcher",
            "config": {"url": url},
            "limits": {"tokens_per_turn": 32},
            "workers": 1,
            "instances_per_worker": 64,
        },
        data={"max_response_length": 120, "max_prompt_length": 200},
        reward={"functions": []},
        rollout={"engine": "scripted", "engine_args": {"text": "<search> one </search>"}},
        trainer={"max_steps": 100},
    )
    assert run_both(config, run) == (3, 4), logs(run)
    failure = failure_of(run)
    assert (failure.service, failure.kind) == ("learner", "bad_state")
    assert re.match(r"the environment failed in 1\d\d of the last 1\d\d trajectories", failure.reason)
    assert f"RuntimeError: the search at {url} failed: <urlopen error [Errno 111] Connection refused>" in failure.reason
    assert "Bring back what the environment needs" in failure.reason
    with closing(JournalReader(run / JOURNAL_FILE)) as journal:
        records = [record for ticket_id in journal.kept() for record in journal.group(ticket_id).trajectories]
    assert {(each.status, each.reward, each.error_kind) for each in records} == {
        (TrajectoryStatus.ERROR, None, "environment_exception")
    }
    assert len(records) >= 96, "all steps before the one in which it stopped"


# --- a killed run whose files are then damaged --------------------------------------------------------


@pytest.fixture(scope="module")
def dead_run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, digits_data: Path) -> Path:
    """The directory of a run whose learner was killed in its third step, with a checkpoint of the second."""
    run = tmp_path_factory.mktemp("dead") / "run"
    trainer = {**SAVED, "save_async": False}  # complete before the next step
    file = write_config(with_ports(small(partial(small_config, tiny_model, digits_data, run), trainer=trainer)), run)
    learner, server = start("learner", file, crash_at="step.trained:3"), start("rollout_server", file)
    try:
        assert learner.wait(timeout=120) == -9, logs(run)
    finally:
        server.kill()
        server.wait()
    assert (run / "checkpoints" / "step-000002").is_dir()
    assert (run / f"{JOURNAL_FILE}-wal").stat().st_size > PAGE_BYTES
    return run


@pytest.fixture
def damaged(dead_run: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    run = tmp_path / "run"
    shutil.copytree(dead_run, run, ignore=shutil.ignore_patterns(".failure*"))
    config = with_ports(load_config(run / "config.yaml", [f"run_dir={run}"]))
    write_config(config, run)
    return run


def _flip_consumption(run: Path) -> None:
    """The bound of a trained group: no index holds it, and no page shows it."""
    with closing(sqlite3.connect(run / JOURNAL_FILE)) as db:
        db.execute("UPDATE consumption SET bound = bound + 1 WHERE position = 1")
        db.commit()


def _flip(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        file = run / name
        content = bytearray(file.read_bytes())
        content[-9] ^= 1
        file.write_bytes(content)

    return damage


def _other_run(run: Path) -> None:
    folder = newest_checkpoint(run)
    assert folder is not None
    state = (folder / "state.json").read_text()
    (folder / "state.json").write_text(state.replace('"run_id": "', '"run_id": "0'))
    write_checksums(folder)


def _remove(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).unlink()


CHECKPOINT = "checkpoints/step-000002"
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a row of the journal": (_flip_consumption, "its rows are not those that were written"),
    "no write-ahead log": (_remove(f"{JOURNAL_FILE}-wal"), "its write-ahead log is damaged or missing"),
    "a group": (_flip(f"{JOURNAL_FILE}.groups-000001"), "does not have its checksum"),
    "a flipped weight": (_flip(f"{CHECKPOINT}/model/model.safetensors"), "model/model.safetensors is not what"),
    "no random state": (_remove(f"{CHECKPOINT}/random.pt"), "random.pt"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_stops_the_resumed_run_before_anything_is_loaded_and_is_left_as_it_is(
    damaged: Path, name: str
) -> None:
    damage, says = DAMAGES[name]
    damage(damaged)
    before = contents(damaged)
    with pytest.raises(BadStateError, match=str(damaged)) as caught, ExitStack() as resources:
        find_start(load_config(damaged / "config.yaml", []), resume=True, resources=resources)
    assert says in str(caught.value)
    assert contents(damaged) == before
    if name == "a row of the journal":
        assert resume_alone(damaged) == 3, logs(damaged)
        failure = failure_of(damaged)
        assert (failure.service, failure.kind) == ("learner", "bad_state")
        assert says in failure.reason


def contents(run: Path) -> dict[Path, bytes]:
    fleeting = (".log", ".lock", "-shm")
    files = [p for p in run.rglob("*.*") if p.is_file() and not p.name.endswith(fleeting)]
    return {file: content for file in files if (content := file.read_bytes())}  # reading may leave an empty log


def resume_alone(run: Path, *overrides: str) -> int:
    """Exit code of a learner that should not come as far as to need a server."""
    return exit_codes([start("learner", run / "config.yaml", "--resume", *overrides)], timeout_s=60)[0]


def reverse_rows(run: Path) -> None:
    """Write the same rows in another order: what is left to train of an epoch would be other rows."""
    (file,) = load_config(run / "config.yaml", []).data.train_files
    table = pq.read_table(file)
    pq.write_table(table.take(list(range(table.num_rows))[::-1]), run / "reversed.parquet")


@pytest.mark.parametrize(
    ("change", "override", "says"),
    [
        (reverse_rows, "data.train_files=[{run}/reversed.parquet]", "fingerprint of the training prompts was"),
        (lambda run: None, "rollout.temperature=0.7", "rollout.temperature was 1.0, is 0.7"),
        (_other_run, "", "is a checkpoint of run 0"),
    ],
    ids=["other data", "another setting", "another run's checkpoint"],
)
def test_a_run_is_not_resumed_as_another_one_and_has_not_failed(
    damaged: Path, change: Callable[[Path], None], override: str, says: str
) -> None:
    change(damaged)
    assert resume_alone(damaged, *override.format(run=damaged).split()) == 2, logs(damaged)
    assert read_failure(damaged) is None
    last = (damaged / "learner.log").read_text().splitlines()[-1]
    assert last.startswith("error: ")
    assert says in last
