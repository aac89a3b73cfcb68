"""The section `environment` from a file and from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.errors import UserError
from asyncrl_plugins.evaluation.environment_files import load_environment, override

SECTION = {"name": "maze.py:Maze"}


def test_words_stand_over_the_section_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("environment: {name: maze.py:Maze, limits: {turns: 4}}\n")
    section = load_environment(tmp_path / "run.yaml", ["limits.images=2", "environment.workers=1"])
    assert (section.limits.turns, section.limits.images, section.workers) == (4, 2, 1)


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("limits.turn=3", "unknown key environment.limits.turn. Did you mean 'limits.turns'?"),
        ("over_limit=skip", "environment.over_limit is 'skip'"),
        ("over_limit", "'over_limit' is no key=value, such as limits.turns=3"),
        ("name.x=3", "'name.x=3': there is no section above"),
    ],
)
def test_mistakes_are_named(word: str, problem: str) -> None:
    with pytest.raises(UserError) as refused:
        override(SECTION, [word])
    assert problem in str(refused.value)


def test_a_runs_file_without_an_environment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("run_dir: runs/x\nmodel: {path: m}\n")
    with pytest.raises(UserError, match=r"run\.yaml has no section `environment`"):
        load_environment(tmp_path / "run.yaml", [])
