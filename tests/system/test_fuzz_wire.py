"""The short version of `make fuzz`: 1,000 mutated messages to each end of the wire, with fixed seeds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.rigs.tiny import ROOT


@pytest.mark.parametrize("arguments", [("--seed", "1"), ("--seed", "2", "--curve")])
def test_both_ends_survive_hostile_peers(arguments: tuple[str, ...]):
    command = [sys.executable, "-m", "tests.rigs.fuzz_wire", "--messages", "1000", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    report = json.loads(done.stdout.partition("Problems:")[0])
    learner, server = report["learner's side"], report["server's side"]
    assert sum(learner["sent"].values()) == 1000
    assert learner["answers"]["malformed"] > 50
    assert learner["answers"]["refused_group"] > 10
    assert learner["answers"]["chunk"] > 5, "existing weights were asked for, too"
    assert learner["taken"] > 400, "the good server worked on"
    assert server["counts"]["messages to the link"] == 900
    assert server["counts"]["transfers that arrived whole"] > 0
