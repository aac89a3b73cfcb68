"""Commands that messages give to be pasted: a path in one may have spaces."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncrl
from asyncrl.errors import pasted

ROOT = Path(asyncrl.__file__).parents[1]
PACKAGES = ("asyncrl", "learner", "rollout_server", "protocol", "asyncrl_plugins")
COMMAND = re.compile(
    r"(?:^|[`(: ])(?:asyncrl [a-z]+(?: [a-z]+)?|python -m [\w.]+|chmod [-+\w]+|rm(?: -\w+)?|mount -o [\w,=]+"
    r"|tail(?: -\w+)*|tensorboard --logdir|unset|export)(?: [^.;:`]*)? $"
)
"""The end of a text behind which a word of a command stands."""
PATHS = re.compile(r"path|folder|file|dir|run|target|config|where|export|grpo", re.IGNORECASE)
"""Expressions of paths; numbers, package names and settings have no spaces."""


def unquoted(source: str) -> Iterator[str]:
    """Paths in commands of formatted texts, as they stand in the source, that are not quoted."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            before = ""
            for part in node.values:
                if isinstance(part, ast.FormattedValue):
                    expression = ast.unparse(part.value)
                    if (
                        COMMAND.search(before)
                        and PATHS.search(expression)
                        and not expression.startswith(("pasted(", "shlex.quote("))
                    ):
                        yield f"{before[-40:]}{{{expression}}}"
                    before += "{}"
                else:
                    before += str(part.value)  # pyright: ignore[reportAttributeAccessIssue]


def test_paths_in_commands_are_quoted() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {place}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for place in unquoted(path.read_text())
    }
    assert sorted(found) == []


@pytest.mark.parametrize(
    ("source", "finds"),
    [
        ('f"To go on: asyncrl train {run_dir}/config.yaml --resume"', True),
        ('f"Run: chmod 600 {path}"', True),
        ('f"mount -o remount,size=8g {folder}"', True),
        ('f"asyncrl export {pasted(run)} TARGET"', False),
        ('f"asyncrl train needs a folder. It is {path}"', False),
    ],
)
def test_the_search_finds_paths_behind_commands(source: str, finds: bool) -> None:
    assert bool(list(unquoted(source))) is finds


@pytest.mark.parametrize("name", ["my run", "it's", "a&b", "plain-1.2/run", "ünï $HOME"])
def test_a_pasted_path_is_one_word_again(name: str) -> None:
    assert shlex.split(f"asyncrl report {pasted(Path(name))}") == ["asyncrl", "report", name]
    assert ("'" in pasted(name)) == (name != "plain-1.2/run")
