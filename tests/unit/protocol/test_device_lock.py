"""The device lease: one holder, growing fences, and a dead holder's lease only when its process is gone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from protocol.device_lock import (
    LEASE_FILE,
    TRACE_FILE,
    DeviceLease,
    LeaseError,
    StaleFence,
    describe,
    process_birth,
    read_tenure,
)
from tests.rigs.tiny import ROOT


def trace(folder: Path) -> list[tuple[int, str, str]]:
    lines = [json.loads(line) for line in (folder / TRACE_FILE).read_text().splitlines()]
    assert all(before["monotonic"] <= after["monotonic"] for before, after in pairwise(lines))
    return [(line["fence"], line["holder"], line["event"]) for line in lines]


def run_until_killed(code: str, folder: Path) -> subprocess.Popen[str]:
    """Another process, once it has run `code`."""
    program = f"""
import sys, time
from pathlib import Path
from protocol.device_lock import DeviceLease, use_device_for
folder = Path(sys.argv[1])
{code}
print("ready", flush=True)
time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which has the lease."""
    process = run_until_killed('assert DeviceLease(folder, "other").try_take()', tmp_path)
    yield process
    process.kill()
    process.wait()


def take_soon(lease: DeviceLease) -> None:
    deadline = time.monotonic() + 10
    while not lease.try_take():
        assert time.monotonic() < deadline


def test_a_dead_holders_lease_comes_back_when_its_engines_processes_are_gone_too(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    """Such a process has the device's memory until it ends, however its parent ended."""
    user = run_until_killed(f"use_device_for({other.pid}, folder)", tmp_path)
    lease = DeviceLease(tmp_path, "learner")
    other.kill()
    try:
        other.wait()
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            assert not lease.try_take()
        assert re.search(rf"other \(pid {other.pid}, .* has ended, but not its process {user.pid}$", describe(tmp_path))
    finally:
        user.kill()
    take_soon(lease)
    assert lease.fence == 2
    assert process_birth(user.pid) is None, "it has ended, though nobody has waited for it yet"
    assert trace(tmp_path) == [(1, "other", "taken"), (2, "learner", "taken")]
    user.wait()


def test_it_is_taken_in_turns_under_growing_fences(tmp_path: Path) -> None:
    learner, server = DeviceLease(tmp_path / "run", "learner"), DeviceLease(tmp_path / "run", "rollout_server")
    assert learner.try_take()
    assert not server.try_take()
    learner.give_up()
    assert "returned it" in describe(tmp_path / "run")
    assert server.try_take(5)
    assert (learner.fence, server.fence) == (None, 5)
    assert not learner.try_take()
    server.give_up()
    assert learner.try_take()
    assert learner.fence == 6
    tenure = read_tenure(tmp_path / "run")
    assert tenure is not None
    assert (tenure.fence, tenure.holder, tenure.pid, tenure.held) == (6, "learner", os.getpid(), True)
    assert trace(tmp_path / "run") == [
        (1, "learner", "taken"),
        (1, "learner", "returned"),
        (5, "rollout_server", "taken"),
        (5, "rollout_server", "returned"),
        (6, "learner", "taken"),
    ]


def test_an_overtaken_fence_is_refused(tmp_path: Path) -> None:
    first, late = DeviceLease(tmp_path, "learner"), DeviceLease(tmp_path, "rollout_server")
    for _ in range(2):
        assert first.try_take()
        first.give_up()
    for fence in (1, 2):
        with pytest.raises(StaleFence, match=f"granted as fence {fence}, but fence 2 has begun"):
            late.try_take(fence)
    assert late.try_take(3), "and the lease is still free"


def test_without_it_nothing_may_be_touched(tmp_path: Path) -> None:
    holder, other = DeviceLease(tmp_path, "learner"), DeviceLease(tmp_path, "rollout_server")
    for call in (other.check, other.give_up):
        with pytest.raises(LeaseError, match="rollout_server may not touch the device: no process has held it yet"):
            call()
    assert holder.try_take()
    holder.check()
    with pytest.raises(LeaseError, match=rf"learner \(pid {os.getpid()}, fence 1\) has had it for 0 s"):
        other.check()
    holder.give_up()
    with pytest.raises(LeaseError, match="returned it 0 s ago"):
        holder.check()


def test_a_holder_that_has_closed_its_files_and_still_lives_is_waited_for(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    """In the end of a process its files go one after the other: the lock's may go before the device's."""
    record = (tmp_path / LEASE_FILE).read_bytes()
    (tmp_path / LEASE_FILE).unlink()
    (tmp_path / LEASE_FILE).write_bytes(record)  # the same words, and a lock that nobody holds
    lease = DeviceLease(tmp_path, "learner")
    assert not lease.try_take()
    assert lease.waited(7, "key").startswith(f"learner waited 7 s for the device (key): other (pid {other.pid},")
    reused = json.dumps({**json.loads(record), "born": "1"})
    (tmp_path / LEASE_FILE).write_text(reused)
    assert lease.try_take(), "a process that only has the holder's number is not waited for"


def test_forked_children_do_not_keep_it(tmp_path: Path) -> None:
    """They share the open file, and with it the lock."""
    lease = DeviceLease(tmp_path, "rollout_server")
    assert lease.try_take()
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        lease.give_up()
        assert DeviceLease(tmp_path, "learner").try_take()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_damaged_file_is_no_free_lease(tmp_path: Path) -> None:
    (tmp_path / LEASE_FILE).write_text("{")
    with pytest.raises(LeaseError, match=r"device\.lease is damaged .* Stop every process of this run"):
        DeviceLease(tmp_path, "learner").try_take()


def test_the_first_turn_of_a_run_that_could_not_begin_leaves_nothing(tmp_path: Path) -> None:
    lease = DeviceLease(tmp_path, "learner")
    assert lease.try_take()
    lease.forget()
    assert list(tmp_path.iterdir()) == []
    assert lease.try_take()
    lease.give_up()
    assert lease.try_take()
    lease.forget()
    assert (tmp_path / LEASE_FILE).exists(), "of a run that had begun, everything stays"
