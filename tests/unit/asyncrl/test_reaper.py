"""The reaper's view of a process on every Python for Linux; whole workers are in tests/system/test_rewards_pool.py."""

from __future__ import annotations

import os
import select
import subprocess

import pytest

from asyncrl.workers.reaper import pidfd_open


def test_a_process_is_watched_by_a_python_that_was_built_for_older_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    child = subprocess.Popen(["sleep", "60"])
    descriptor = pidfd_open(child.pid)
    try:
        assert not select.select([descriptor], [], [], 0)[0]
        child.kill()
        assert select.select([descriptor], [], [], 60)[0]
        child.wait()
        with pytest.raises(ProcessLookupError):
            pidfd_open(child.pid)
    finally:
        os.close(descriptor)
        child.kill()
