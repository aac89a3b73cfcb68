"""scripts/first_gpu_hour.sh: its order, and what it says of a machine without a GPU or with one that is no use."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "first_gpu_hour.sh"
STEPS = (
    *("driver", "headers", "imports", "doctor", "gpu-tests", "digits", "vllm-run", "parity-float32"),
    *("parity-bfloat16", "sync-cycle", "channel-cuda_ipc", "channel-nccl", "channel-shm", "channel-zmq", "profile"),
)
SMI = """#!/bin/bash
[ "$1" = -L ] && echo "GPU 0: NVIDIA H100 (UUID: GPU-1)" && exit
echo 570.86.10
"""


def run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment["PATH"] = f"{path}:/usr/bin:/bin" if path else "/usr/bin:/bin"
    return subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, env=environment)


def test_it_lists_its_steps_in_order_and_names_what_exists(tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    done = run("--dry-run", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert tuple(re.findall(r"^ *\d+\. (\S+)", done.stdout, re.MULTILINE)) == STEPS
    assert done.stdout.count("expected: ") == len(STEPS)
    assert not (tmp_path / "out").exists()
    for file in re.findall(r" (benchmarks/\S+\.py|tests/\S+)", done.stdout):
        assert (ROOT / file).exists(), file
    for module in re.findall(r"-m ((?:benchmarks|asyncrl)\.[\w.]+)", done.stdout):
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), module
    for code in re.findall(r"^(?:imports|profile)='(.*?)'$", SCRIPT.read_text(), re.MULTILINE | re.DOTALL):
        compile(code, "a step", "exec")


def test_without_a_gpu_it_says_so_of_each_step_that_needs_one(tmp_path: Path) -> None:
    if Path("/usr/bin/nvidia-smi").exists():
        pytest.skip("this machine has a driver")
    others = [name for name in STEPS if name not in ("headers", "digits")]
    done = run("--out", str(tmp_path), *others)
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "report.md").read_text()
    assert f"0 passed, 0 failed, {len(others)} skipped" in report
    assert "nothing below says anything about CUDA" in report
    assert report.count("skip: no GPU (needs 1, found 0)") == len(others) - 3
    assert report.count("skip: no GPU (needs 2, found 0)") == 3


def test_a_step_that_fails_is_in_the_report_with_its_output_and_the_rest_goes_on(tmp_path: Path) -> None:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(SMI)
    smi.chmod(0o755)
    done = run("--out", str(tmp_path), "driver", "channel-nccl", path=smi.parent)
    assert done.returncode == 1
    assert re.search(r"\| 1 \| driver \|.*\| FAIL: exit code 1 \| \d+ \| \S+01-driver.log \|", done.stdout)
    assert "skip: no GPU (needs 2, found 1)" in done.stdout
    assert "driver 570.86.10 is too old" in (tmp_path / "01-driver.log").read_text()
    assert run("--out", str(tmp_path), "chanel", path=smi.parent).returncode == 2
