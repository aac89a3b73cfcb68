"""`kill -9` of environment, rollout server and learner while an environment answers a turn.

The environment's step waits for a file to go (tests/rigs/held_lamp.py), so that every kill lands inside of one.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.database import JournalReader
from asyncrl.telemetry.jsonl import read_lines
from protocol.messages import Group, TrajectoryStatus
from tests.rigs.prefork import Service
from tests.rigs.small_runs import assert_every_prompt_trained_once, logs
from tests.rigs.tiny import ROOT
from tests.rigs.two_processes import start, with_ports, write_config
from tests.rigs.waiting import exit_codes, wait_until

pytestmark = pytest.mark.slow
STEPS = 6
TURNS_REWARD = 0.75
"""Of three turns; every trajectory that is scored has it."""


class Held:
    """Steps of environments that wait, by the files that they have."""

    def __init__(self, folder: Path, run: Path) -> None:
        folder.mkdir()
        self._folder, self._run = folder, run

    def hold(self) -> None:
        (self._folder / "hold").touch()

    def release(self) -> None:
        (self._folder / "hold").unlink()

    def waiting(self, without: set[int]) -> set[int]:
        """Processes that are inside of a step, once there is one that is not of these."""
        wait_until(lambda: bool(self._pids() - without), "a step that waits", self._run)
        return self._pids() - without

    def _pids(self) -> set[int]:
        return {int(file.name.partition("-")[0]) for file in self._folder.iterdir() if file.name != "hold"}


def test_nothing_is_lost_doubled_or_scored_with_zero_by_deaths_inside_turns(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    run, held = tmp_path / "run", Held(tmp_path / "held", tmp_path / "run")
    file = write_config(with_ports(held_run(make_config, tmp_path / "held")), run)
    held.hold()
    learner, server = start("learner", file), start("rollout_server", file)
    try:
        dead = kill_environments(held)
        held.release()
        wait_until((run / "metrics.jsonl").exists, "a step with what came of their trajectories", run)

        held.hold()
        dead |= held.waiting(without=dead)
        kill(server)
        server = start("rollout_server", file)
        inside = held.waiting(without=dead)
        kill(learner)
        assert held.waiting(without=dead) >= inside
        learner = start("learner", file, "--resume")
        held.release()
        assert exit_codes([learner, server]) == [0, 0], logs(run)
    finally:
        for service in (learner, server):
            service.kill()
    assert held.waiting(without=set()) >= dead, "who died inside of a step never left it"
    check_run(run)


def held_run(make_config: Callable[..., RunConfig], folder: Path) -> RunConfig:
    return make_config(
        environment={
            "name": str(ROOT / "tests" / "rigs" / "held_lamp.py:HeldLamp"),
            "config": {"folder": str(folder)},
            "limits": {"turns": 4, "tokens_per_turn": 16, "images": 4},
            "workers": 2,
            "instances_per_worker": 8,
        },
        data={"max_response_length": 120, "max_prompt_length": 390},
        rollout={"engine": "scripted", "engine_args": {"text": "answer 1"}},
        trainer={"max_steps": STEPS, "save_freq": 1},
        network={"timeout_s": 2.0},
    )


def kill_environments(held: Held) -> set[int]:
    """Kill one of two processes, and its successor while that tries the same trajectories again: its second death is
    one too many for them."""
    (first, *_) = held.waiting(without=set())
    (second, *_) = held.waiting(without={first})
    os.kill(first, signal.SIGKILL)
    (successor,) = held.waiting(without={first, second})
    os.kill(successor, signal.SIGKILL)
    return {first, successor}


def kill(service: Service) -> None:
    assert service.poll() is None
    service.kill()
    service.wait()


def check_run(run: Path) -> None:
    assert_every_prompt_trained_once(run, STEPS)
    lines = read_lines(run / "metrics.jsonl")
    assert [(line["step"], line["ledger_residual"]) for line in lines] == [(step, 0) for step in range(1, STEPS + 1)]
    with closing(JournalReader(run / JOURNAL_FILE)) as journal:
        groups: list[Group] = [journal.group(ticket_id) for ticket_id in journal.kept()]
    assert len(groups) == STEPS * 4
    errors: Counter[str] = Counter()
    for record in (record for group in groups for record in group.trajectories):
        if record.status is TrajectoryStatus.ERROR:
            assert record.reward is None
            errors[record.error_kind] += 1
        else:
            assert record.reward == pytest.approx(TURNS_REWARD + record.rewards["short"])
            assert len(record.turns) == 3
    assert set(errors) == {"environment_died", "environment_neighbour_killed"}, errors
