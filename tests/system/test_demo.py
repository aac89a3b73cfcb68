"""README's first command, in small, from the built wheel: what `make demo` runs once there is an environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli import main
from asyncrl.demo import data
from asyncrl.demo.prepare import WARM_START
from scripts.core_tree import install, with_plugin
from tests.rigs.tiny import ROOT

PACKAGES = ("asyncrl", "learner", "protocol", "rollout_server")
DRAWN_PORTS = (
    "network.control_port=0",
    "network.weights_port=0",
    "telemetry.learner_port=0",
    "telemetry.rollout_port=0",
)
QUICK = ("digits", "--quick", "--steps", "2", "evaluation.every_steps=1", "trainer.save_freq=0", *DRAWN_PORTS)
FEW = 8
"""Held-out rows of the demo whose processes are not forks."""


def pip(python: Path | str, *arguments: str) -> None:
    quiet = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    done = subprocess.run([str(python), "-m", "pip", *arguments], env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel without plug-ins, with the flags of `make wheel`, from a copy: a build leaves folders beside it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "pyproject.toml").write_text(with_plugin((ROOT / "pyproject.toml").read_text(), ""))
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    (flags,) = re.findall(r"-m pip wheel (.+) --wheel-dir dist \.$", (ROOT / "Makefile").read_text(), re.M)
    pip(sys.executable, "wheel", *flags.split(), "--wheel-dir", str(source / "dist"), str(source))
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the programs of an environment that has the wheel and, from this one, everything but the checkout."""
    environment = tmp_path_factory.mktemp("environment")
    install(wheel, environment)
    return environment / "bin"


def outside(**variables: str) -> dict[str, str]:
    """The variables of a process that knows nothing of the checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables


def test_the_wheel_has_the_packages_with_their_data_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {*PACKAGES, "asyncrl-0.1.0.dist-info"}
    sources = {str(file.relative_to(ROOT)) for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    others = {f"asyncrl/demo/{name}.yaml" for name in ("sft", "grpo", "grpo_lora")}
    others |= {"protocol/README.md", "asyncrl/__init__.pyi"}
    shipped = [*(ROOT / "asyncrl" / "algorithms" / "overlays").glob("*.yaml"), *WARM_START.glob("*")]
    others |= {str(file.relative_to(ROOT)) for file in shipped}
    assert {name for name in names if "dist-info" not in name} == sources | others


@pytest.mark.slow
def test_the_demo_from_the_wheel_in_an_empty_folder_from_its_warm_start_to_an_export(
    installed: Path, tmp_path: Path
) -> None:
    where = "import asyncrl, learner, protocol; print(asyncrl.__file__, learner.__file__, protocol.__file__)"
    absent = "from importlib.util import find_spec; assert find_spec('asyncrl_plugins') is None"
    subprocess.run([installed / "python", "-c", absent], cwd=tmp_path, env=outside(), check=True)
    found = subprocess.check_output([installed / "python", "-c", where], cwd=tmp_path, env=outside(), text=True)
    assert all(Path(file).is_relative_to(installed.parent) for file in found.split()), found
    command = [installed / "asyncrl", "demo", *QUICK[1:], f"data.max_val_rows={FEW}", "batch.group_size=2"]
    ran = subprocess.run(command, cwd=tmp_path, env=outside(), capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["runs"]
    demo = tmp_path / "runs" / "demo-1"
    summary = check_demo(demo, ran.stdout, ["data", "grpo"], rows=FEW)
    assert list(summary["warm_start"]) == ["greedy"]
    assert "`asyncrl eval` is not installed. This installation of asyncrl has no plug-ins" in ran.stdout


def check_scored_demo(demo: Path, printed: str, stages: list[str], rows: int = 32) -> None:
    """Assert what `check_demo` does, and that the start was scored by each decoding, and the export as the run was."""
    summary = check_demo(demo, printed, stages, rows)
    greedy, sampled, *words = summary["warm_start"]
    assert (greedy, sampled) == ("greedy", "sampled at temperature 1")
    assert words, "a demonstration begins with a word"
    (checked,) = re.findall(rf"^pass@1 ([\d.]+) .* rows {rows} .* errors 0$", printed, re.M)
    assert checked == f"{summary['after_steps']['2']['accuracy']:.4f}", "plain transformers agrees"


def check_demo(demo: Path, printed: str, stages: list[str], rows: int = 32) -> dict[str, Any]:
    """Assert that each stage has used what the one before it has left, and that two steps have been evaluated."""
    summary = json.loads((demo / "summary.json").read_text())
    assert list(summary["seconds"]) == stages
    assert summary["held_out_rows"] == rows
    assert list(summary["after_steps"]) == ["1", "2"], "halfway and at the end"
    after = summary["after_steps"]["2"]
    assert re.search(rf"^  after 2 steps, greedy +{after['accuracy']:.3f} ± {after['error']:.3f}$", printed, re.M)
    assert (demo / "grpo" / "export" / "model.safetensors").is_file()
    before = json.loads((demo / "grpo" / "evaluations.jsonl").read_text().splitlines()[0])
    assert before["accuracy"] == summary["warm_start"]["greedy"]["accuracy"], "both are greedy decoding"
    return summary


def test_rows_are_the_same_on_one_core_and_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ("--sft-rows", "0", "--rl-rows", "16", "--eval-rows", "4")
    data.main(["--out", str(tmp_path / "one"), *rows])
    monkeypatch.setattr(data, "CHUNK_ROWS", 4)  # four chunks are enough for workers
    data.main(["--out", str(tmp_path / "all"), *rows])
    files = sorted(file.name for file in (tmp_path / "all").iterdir())
    assert files == ["eval.parquet", "rl.parquet"], "a part without rows has no file"
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "all" / file).read_bytes()


def test_make_demo_is_this_command() -> None:
    for flags, expected in (("", "asyncrl demo"), ("FROM_SCRATCH=1", "asyncrl demo --from-scratch")):
        told = subprocess.check_output(
            ["make", "-n", "--no-print-directory", "demo", *flags.split()], cwd=ROOT, text=True
        )
        assert told.splitlines()[-1].split("/")[-1].strip() == expected


def test_a_mistake_is_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, message in {
        ("--from-scratch", "--steps=-3"): "trainer.max_steps is -3",
        ("--from-scratch", "run_dir=elsewhere"): "leave run_dir and model.path as they are",
        ("--from-scratch", "evaluation.before_training=false"): "leave evaluation.before_training as it is",
    }.items():
        assert main(["demo", "digits", "--folder", "demo", *words]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr("asyncrl.demo.prepare.WARM_START", tmp_path / "nowhere")
    assert main(["demo", "digits"]) == 2
    assert "no warm start in " in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert main(["demo", "digits", "--from-scratch"]) == 2
    assert "pip install 'asyncrl[demo]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
