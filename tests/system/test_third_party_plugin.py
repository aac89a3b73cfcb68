"""A package of a third party adds a loss, a reward, a rollout engine, a command and an option to a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.cli import main
from asyncrl.config.schema import RunConfig
from tests.rigs.small_runs import logs
from tests.rigs.tiny import ROOT

MakeConfig = Callable[..., RunConfig]
SETTINGS = (
    "algorithm.policy_loss=acme_doubled",
    "algorithm.acme_doubled.factor=3",
    "rollout.engine=acme_hf",
    "reward.functions=[{function: acme_short}]",
)


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which the package is installed, as pip does it."""
    source, target = tmp_path_factory.mktemp("source") / "acme", tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT / "tests" / "rigs" / "third_party", source)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, capture_output=True)
    return target


def asyncrl(acme: Path | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder) for folder in (acme, os.environ.get("PYTHONPATH")) if folder])
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "asyncrl", *arguments]
    return subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_its_command_and_option_are_listed_where_it_is_installed(acme: Path) -> None:
    shown = asyncrl(acme, "--help").stdout
    assert "acme-greet" in shown
    assert "greet someone" in shown
    assert "--acme-note TEXT" in asyncrl(acme, "train", "--help").stdout
    assert asyncrl(acme, "acme-greet", "Ada").stdout == "hello Ada\n"
    assert "acme" not in asyncrl(None, "--help").stdout
    assert "acme" not in asyncrl(None, "train", "--help").stdout


@pytest.mark.slow
def test_a_run_uses_its_loss_reward_engine_and_option(acme: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    file = written(make_config(trainer={"max_steps": 2}), tmp_path)
    ran = asyncrl(acme, "train", str(file), *SETTINGS, "--acme-note", "second try")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith("note: second try\n")
    run = tmp_path / "run"
    assert "the engine of acme starts" in logs(run / "logs", whole=True)
    used = (run / "config.yaml").read_text()
    assert "factor: 3.0" in used


def test_its_names_are_refused_where_it_is_not_installed(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not in the environment of this process."""
    file = written(make_config(), tmp_path)
    for setting in (SETTINGS[0], SETTINGS[2], SETTINGS[3]):
        code, said = main(["train", str(file), setting, "--dry-run"]), capsys.readouterr()
        assert code == 2, said.out
        assert "acme" in said.err


def written(config: RunConfig, folder: Path) -> Path:
    from asyncrl.config.load import dump_config

    file = folder / "acme.yaml"
    file.write_text(dump_config(config))
    return file
