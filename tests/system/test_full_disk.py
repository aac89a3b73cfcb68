"""The kernel refuses to write: journal, checkpoint, metrics, shared memory. The run says where, and continues.

Small disks are mounted where only the learner sees them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from tests.rigs.small_disks import needs_mount, small_disks
from tests.rigs.small_runs import assert_every_prompt_trained_once, failure_of, logs, small
from tests.rigs.two_processes import start, with_ports, write_config
from tests.rigs.waiting import exit_codes

pytestmark = pytest.mark.slow


@needs_mount
@pytest.mark.parametrize(
    ("place", "size", "says"),
    [
        ("run", "1200k", "start again, with --resume if the run had begun"),
        ("/dev/shm", "600k", "/dev/shm"),
    ],
)
def test_a_full_disk_stops_the_run_and_with_room_it_continues(
    make_config: Callable[..., RunConfig], tmp_path: Path, place: str, size: str, says: str
) -> None:
    run, disk = tmp_path / "run", tmp_path / place
    config = small(
        make_config,
        learner={"max_staleness": 1},
        rollout={"weights_channel": "zmq"},
        trainer={"max_steps": 8, "save_freq": 3},
    )
    config = config.model_copy(update={"run_dir": str(run)})
    logs_in = tmp_path / "logs"
    file = write_config(with_ports(config), logs_in)
    learner = start("learner", file, first=small_disks(logs_in, {str(disk): size}, str(tmp_path / "kept")))
    assert exit_codes([learner, start("rollout_server", file)]) == [3, 4], logs(logs_in)
    if disk == run:
        shutil.copytree(tmp_path / "kept", run, dirs_exist_ok=True)  # to a larger disk
    failure = failure_of(run)
    assert failure.service == "learner"
    assert says in failure.reason
    assert re.search("MiB free|has [0-9]+ free of", failure.reason)
    assert str(disk) in failure.reason
    assert failure.kind == ("bad_state" if place == "/dev/shm" else "disk_full")
    if place == "run":
        assert exit_codes([start("learner", file, "--resume"), start("rollout_server", file)]) == [0, 0], logs(logs_in)
        assert_every_prompt_trained_once(run, config.trainer.max_steps)
