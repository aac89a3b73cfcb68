"""The program in a process of its own: instant where nothing heavy is needed, and nothing is lost at its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.asyncrl.test_cli import config_file

__all__ = ["config_file"]


LIGHT = frozenset({"pydantic", "numpy", "yaml"})
HEAVY = frozenset({"torch", "transformers", "datasets", "pyarrow", "rich"})


def run_program(*arguments: str, packages: frozenset[str]) -> tuple[str, str]:
    """Output of a command, and those of the packages that it has imported."""
    code = (
        "import sys\nfrom asyncrl.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"print(sorted({set(packages)} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=20)
    *_, imported = done.stdout.splitlines()
    return done.stdout + done.stderr, imported


@pytest.mark.parametrize(
    ("arguments", "told", "packages"),
    [
        (["--help"], "the learner alone", HEAVY | LIGHT),
        (["train", "--help"], "--dry-run", HEAVY | LIGHT),
        (["learn", "{config}", "batch.group_sise=4"], "batch.group_size", HEAVY),
    ],
)
def test_help_and_mistakes_in_the_configuration_load_nothing_heavy(
    config_file: Path, arguments: list[str], told: str, packages: frozenset[str]
) -> None:
    output, imported = run_program(*(word.format(config=config_file) for word in arguments), packages=packages)
    assert imported == "[]", output
    assert told in output


def test_the_program_ends_with_the_code_and_the_output_of_its_command(config_file: Path) -> None:
    """The interpreter is not taken apart: nothing may be lost with it, not the output to a pipe nor a crash's code."""
    crash = "import asyncrl.__main__ as m\ndef main(): raise RuntimeError('broken')\nm.main = main\nm.run()"
    module = [sys.executable, "-m", "asyncrl"]
    for command, code, told in (
        ([*module, "train", "--help"], 0, "YAML configuration"),
        ([*module, "learn", str(config_file), "batch.group_sise=4"], 2, "batch.group_size"),
        ([*module, "trian"], 2, "usage"),
        ([sys.executable, "-c", crash], 1, "RuntimeError: broken"),
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        assert done.returncode == code
        assert told in done.stdout + done.stderr
