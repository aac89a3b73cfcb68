"""The short version of `make fuzz`: 1,000 mutated messages to each end of the wire, with fixed seeds."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.rigs.prefork import fork_module


@pytest.mark.parametrize("arguments", [("--seed", "1"), ("--seed", "2", "--curve")])
def test_both_ends_survive_hostile_peers(arguments: tuple[str, ...], tmp_path: Path):
    output = tmp_path / "output"
    fuzzing = fork_module("tests.rigs.fuzz_wire", ["--messages", "1000", *arguments], output, os.environ)
    code, printed = fuzzing.wait(timeout=300), output.read_text()
    assert code == 0, printed[-4000:]
    report = json.loads(printed.partition("Problems:")[0])
    learner, server = report["learner's side"], report["server's side"]
    assert sum(learner["sent"].values()) == 1000
    assert learner["answers"]["malformed"] > 50
    assert learner["answers"]["refused_group"] > 10
    assert learner["answers"]["chunk"] > 5, "existing weights were asked for, too"
    assert learner["taken"] > 400, "the good server worked on"
    assert server["counts"]["messages to the link"] == 900
    assert server["counts"]["transfers that arrived whole"] > 0
