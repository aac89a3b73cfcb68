"""The rig that makes a small model of every family ends with what it started, whatever a family takes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.rigs import family_matrix
from tests.rigs.family_matrix import MEMORY, Verdict, examine, examine_apart


def leave_files(_: str, folder: Path) -> Verdict:
    (folder / "weights").write_bytes(b"1")
    time.sleep(60)
    raise AssertionError


def take_memory(_: str, folder: Path) -> Verdict:
    (folder / "weights").write_bytes(b"1")
    return Verdict(str(torch.empty(MEMORY, dtype=torch.uint8)), "")


@pytest.mark.parametrize(
    ("examine_it", "said"), [(leave_files, "it took longer than 0.3 s"), (take_memory, "can't allocate memory")]
)
def test_a_family_that_takes_too_much_is_ended_and_its_folder_goes(
    examine_it: Callable[..., Verdict], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(family_matrix, "examine", examine_it)
    monkeypatch.setattr(family_matrix, "DEADLINE_S", 0.3 if examine_it is leave_files else 60)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    verdict = examine_apart("llama")
    assert verdict.trains == "crash"
    assert said in verdict.why
    assert not any(tmp_path.iterdir())


def test_a_family_without_a_small_copy_is_counted_and_not_built(tmp_path: Path) -> None:
    verdict = examine("blt", tmp_path)
    assert verdict.trains == "not built"
    assert "its smallest layers have 3,115,625,728 parameters" in verdict.why
    assert [path.name for path in tmp_path.iterdir()] == ["given"]
