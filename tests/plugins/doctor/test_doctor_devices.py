"""`asyncrl doctor` on machines with a GPU: a driver that is too old, and the tools of compilers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.devices.device import unseen_gpus
from asyncrl_plugins.doctor import machine
from asyncrl_plugins.doctor.machine import find_devices
from tests.rigs.gpu_driver import script, unseen_gpu


@pytest.fixture(autouse=True)
def _forget_the_fake_gpu() -> Any:
    yield
    unseen_gpus.cache_clear()


def test_doctor_says_it_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unseen_gpu(tmp_path, monkeypatch)("535.183.01")
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


def test_doctor_lists_devices_in_another_process_before_torch_is_imported_in_its_own() -> None:
    """Both take seconds, and there are two cores."""
    code = "import sys\nfrom asyncrl_plugins.doctor.examine import examine\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert done.stdout == "False\n", done.stderr
