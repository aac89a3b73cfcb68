"""A dozen cycles and six deaths: learner and rollout server never have the device together, and nothing is lost.

Two accounts that know nothing of each other must agree: the lease's own trace, and what the engines did when
(tests/rigs/device_witness.py). Both are in seconds of the machine's one monotonic clock.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.journal import JOURNAL_FILE
from asyncrl.telemetry.jsonl import read_lines
from protocol.device_lock import TRACE_FILE
from tests.rigs.device_witness import USES_FILE, Use, read_uses
from tests.rigs.prefork import Service
from tests.rigs.small_runs import assert_every_prompt_trained_once, logs, small
from tests.rigs.two_processes import run_both, start, with_ports, write_config
from tests.rigs.waiting import wait_until
from tests.system.test_resume import assert_same_run

pytestmark = pytest.mark.slow
CYCLES, KILLS, SEED = 14, 6, 4
STOPPED_S = 0.2
"""Half of the victims stand still for so long before they die: a holder that does nothing is a holder all the same."""
RUN_S = 240.0


@dataclass
class Turn:
    """One line `taken` of the lease's trace, with its `returned` or the death of its holder."""

    fence: int
    side: str
    pid: int
    taken: float
    ended: float


@dataclass
class Rig:
    """Both services under the witness; one that dies is started again."""

    file: Path
    rng: random.Random
    processes: dict[str, Service] = field(default_factory=dict)
    deaths: dict[int, float] = field(default_factory=dict)
    """Monotonic time at which each victim, alive, was about to be killed."""
    killed: Counter[str] = field(default_factory=Counter)

    @property
    def run(self) -> Path:
        return self.file.parent

    def start(self, side: str) -> None:
        resume = ["--resume"] if side == "learner" and (self.run / JOURNAL_FILE).exists() else []
        self.processes[side] = start("tests.rigs.device_witness", self.file, side, *resume)

    def trace(self) -> list[dict[str, Any]]:
        file = self.run / TRACE_FILE
        return read_lines(file) if file.exists() else []

    def kill(self, side: str) -> None:
        """Once it has had a few turns: at a random moment, or while it surely has the device and does nothing."""
        process, turns = self.processes[side], self.rng.randint(1, 2)
        self.wait(lambda: sum(line["pid"] == process.pid for line in self.trace()) >= 2 * turns - 1)
        time.sleep(self.rng.uniform(0, 0.1))
        if self.rng.random() < 0.5:
            self.wait(lambda: self.stopped_with_the_device(process))
            time.sleep(STOPPED_S)
        assert process.poll() is None, f"{side} ended with {process.poll()}\n{logs(self.run)}"
        self.deaths[process.pid] = time.monotonic()
        process.kill()
        process.wait()
        self.killed[side] += 1

    def stopped_with_the_device(self, process: Service) -> bool:
        """Stops it in its turn; lets it go on if the turn was over before it stood still."""

        def has_it() -> bool:
            last = self.trace()[-1]
            return last["pid"] == process.pid and last["event"] == "taken"

        if not has_it():
            return False
        process.send_signal(signal.SIGSTOP)
        self.wait(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        if not has_it():
            process.send_signal(signal.SIGCONT)
            return False
        return True

    def wait(self, satisfied: Callable[[], bool]) -> None:
        wait_until(satisfied, "the victim's turn", self.run, self.until - time.monotonic(), poll_s=0.005)

    def until_finished(self) -> None:
        self.until = time.monotonic() + RUN_S
        sides = ["learner", "rollout_server"]
        for side in sides:
            self.start(side)
        try:
            for victim in self.rng.sample(sides * (KILLS // 2), KILLS):
                self.kill(victim)
                self.start(victim)
            codes = [self.processes[side].wait(timeout=self.until - time.monotonic()) for side in sides]
            assert codes == [0, 0], logs(self.run)
        finally:
            for process in self.processes.values():
                process.kill()
                process.wait()

    def turns(self) -> list[Turn]:
        """In the order of their fences."""
        lines = self.trace()
        returned = {line["fence"]: line["monotonic"] for line in lines if line["event"] == "returned"}
        return [
            Turn(
                line["fence"],
                line["holder"],
                line["pid"],
                line["monotonic"],
                returned.get(line["fence"], self.deaths.get(line["pid"], float("inf"))),
            )
            for line in lines
            if line["event"] == "taken"
        ]


def test_six_kills_in_14_cycles_and_the_two_sides_never_have_the_device_together(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = small(
        make_config,
        trainer={"mode": "sync", "max_steps": CYCLES, "save_freq": 5},
        network={"timeout_s": 1.5},
    )
    rig = Rig(write_config(with_ports(config), tmp_path / "run"), random.Random(SEED))
    rig.until_finished()
    assert rig.killed == {"learner": KILLS // 2, "rollout_server": KILLS // 2}

    # The lease's account: fences grow, and every turn begins after the end of the one before it.
    turns = rig.turns()
    assert [turn.fence for turn in turns] == sorted({turn.fence for turn in turns})
    sides = Counter(turn.side for turn in turns)
    assert min(sides["learner"], sides["rollout_server"]) >= CYCLES, sides
    for before, after in pairwise(turns):
        assert before.ended <= after.taken, (before, after)
    died_with_it = Counter(turn.side for turn in turns if turn.ended == rig.deaths.get(turn.pid))
    assert min(died_with_it["learner"], died_with_it["rollout_server"]) >= 1, died_with_it

    # The engines' account: none used the device without the lease, so no two at once.
    uses = read_uses(rig.run / USES_FILE)
    assert {use.side for use in uses} == set(sides)
    assert [use for use in uses if not within_a_turn(use, turns, rig.deaths)] == []

    # And the run is the one that nobody disturbed, which had a device for each side.
    assert_every_prompt_trained_once(rig.run, steps=CYCLES)
    whole = tmp_path / "whole"
    undisturbed = config.model_copy(
        update={"run_dir": str(whole), "trainer": config.trainer.model_copy(update={"mode": "async"})}
    )
    (tmp_path / "run" / "evaluations.jsonl").touch()
    assert run_both(undisturbed, whole) == (0, 0), logs(whole)
    (whole / "evaluations.jsonl").touch()
    assert_same_run(rig.run, whole, config)


def within_a_turn(use: Use, turns: list[Turn], deaths: dict[int, float]) -> bool:
    end = use.end if use.end is not None else deaths[use.pid]
    return any(turn.pid == use.pid and turn.taken <= use.begin and end <= turn.ended for turn in turns)
