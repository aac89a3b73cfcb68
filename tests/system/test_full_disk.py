"""The kernel refuses to write: journal, checkpoint, metrics, shared memory. The run says where, and continues.

Small disks are mounted where only the learner sees them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from tests.rigs.small_runs import assert_every_prompt_trained_once, failure_of, logs, small
from tests.rigs.two_processes import start, with_ports, write_config
from tests.rigs.waiting import exit_codes

pytestmark = pytest.mark.slow

SMALL_DISK = (
    'mkdir -p "$1" "$2"; mount -t tmpfs -o size="$3" tmpfs "$1" || exit 99; disk=$1 kept=$2; shift 3; "$@"; '
    'code=$?; cp -a "$disk/." "$kept"; exit $code'
)
"""A shell script: folder to put a small disk on, folder for what is on it at the end, its size, and the command."""
OWN_MOUNTS = ("unshare", "-Urmpf", "--kill-child", "--mount-proc")


def can_mount() -> bool:
    if not shutil.which("unshare"):
        return False
    command = [*OWN_MOUNTS, "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


needs_mount = pytest.mark.skipif(not can_mount(), reason="may not mount a small disk")


def on_small_disk(disk: Path, kept: Path, size: str) -> list[str]:
    return [*OWN_MOUNTS, "sh", "-c", SMALL_DISK, "sh", str(disk), str(kept), size]


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
    learner = start("learner", file, under=on_small_disk(disk, tmp_path / "kept", size))
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
