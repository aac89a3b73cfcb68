"""The short version of `make fuzz`: mutated messages to each end of the wire, with fixed seeds; fewer under CURVE."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.rigs.prefork import fork_module


@pytest.mark.parametrize(
    ("messages", "arguments"), [(1000, ("--seed", "1")), (500, ("--seed", "2", "--curve"))], ids=["plain", "curve"]
)
def test_both_ends_survive_hostile_peers(messages: int, arguments: tuple[str, ...], tmp_path: Path) -> None:
    output, share = tmp_path / "output", messages / 1000
    fuzzing = fork_module("tests.rigs.fuzz_wire", ["--messages", str(messages), *arguments], output, os.environ)
    code, printed = fuzzing.wait(timeout=300), output.read_text()
    assert code == 0, printed[-4000:]
    report = json.loads(printed.partition("Problems:")[0])
    learner, server = report["learner's side"], report["server's side"]
    assert sum(learner["sent"].values()) == messages
    assert learner["answers"]["malformed"] > 50 * share
    assert learner["answers"]["refused_group"] > 10 * share
    assert learner["answers"]["chunk"] > 5 * share, "existing weights were asked for, too"
    assert learner["taken"] > 400 * share, "the good server worked on"
    assert server["counts"]["messages to the link"] == 900 * share
    assert server["counts"]["transfers that arrived whole"] > 0
