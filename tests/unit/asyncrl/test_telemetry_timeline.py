"""Spans of activities, and the environment of each start, as files of a run."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from asyncrl.telemetry.host_versions import describe_environment, read_starts, record_start
from asyncrl.telemetry.timeline import MAX_PENDING, Timeline


def test_overlapping_spans_of_one_activity_become_one() -> None:
    now = 1000.0
    timeline = Timeline(lambda: now)
    timeline.ended("server", "generating", 2.0, ago_s=1.0)  # 997 to 999
    timeline.ended("server", "generating", 3.0)  # 997 to 1000
    timeline.ended("server", "scoring", 0.5)
    for version in (1, 2):
        timeline.ended("server", "loading", 1.0, version=version)
    lines = sorted(timeline.take(), key=lambda line: line["what"])
    assert [line["version"] for line in lines if line["what"] == "loading"] == [1, 2], "spans with details stay apart"
    assert [line for line in lines if "version" not in line] == [
        {"who": "server", "what": "generating", "since": 997.0, "until": 1000.0},
        {"who": "server", "what": "scoring", "since": 999.5, "until": 1000.0},
    ]
    now = 1002.0
    timeline.ended("server", "generating", 6.0)  # began before the first take
    assert timeline.take() == [{"who": "server", "what": "generating", "since": 1000.0, "until": 1002.0}]
    assert timeline.take() == []


def test_an_activity_that_fails_has_a_span_and_many_of_them_take_bounded_memory() -> None:
    timeline = Timeline()
    for _ in range(2 * MAX_PENDING):
        with suppress(ValueError), timeline.doing("learner", "saving"):
            raise ValueError("no room")
    assert 1 <= len(timeline.take()) <= MAX_PENDING


def test_every_start_adds_its_environment(tmp_path: Path) -> None:
    record_start(tmp_path, 0, "cpu")
    record_start(tmp_path, 7, "NVIDIA H100")
    starts = read_starts(tmp_path)
    assert [(start["step"], start["device"]) for start in starts] == [(0, "cpu"), (7, "NVIDIA H100")]
    assert starts[0]["packages"]["pyzmq"]
    assert starts[0]["python"] == ".".join(map(str, sys.version_info[:3]))
    for damaged in ("", "[]", '{"starts": 3}', '{"starts": [1, null]}', "\x00"):
        (tmp_path / "environment.json").write_text(damaged)
        assert read_starts(tmp_path) == []


def test_the_commit_is_named_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *words], check=True)
    assert len(describe_environment()["git"]["working directory"]) == 12
