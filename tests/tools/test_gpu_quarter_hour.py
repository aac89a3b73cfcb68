"""scripts/gpu_quarter_hour.sh: every step runs on a CPU, and one that fails is in the report while the rest goes on."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_quarter_hour.sh"
STEPS = ("imports", "vllm", "cycle", "learner", "decode", "updates")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=600)


def test_the_dry_run_executes_every_step_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    done = run("--dry-run", "--out", str(tmp_path / "out"))
    report = (tmp_path / "out" / "report.md").read_text()
    assert done.returncode == 0, report + done.stderr
    assert tuple(re.findall(r"^\| (\w+) \| .* \| pass \| \d+ \|$", report, re.MULTILINE)) == STEPS
    assert "nothing below says anything about CUDA" in report
    for measured in ("sampling: ", "AdamW ", "6, ragged", "log-probs of engine and learner", "publication, s"):
        assert measured in report, measured


def test_a_step_that_fails_is_in_the_report_with_its_reason_and_the_rest_goes_on(tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "vllm.py"
    broken.parent.mkdir()
    broken.write_text("raise ImportError('no kernel image')")
    done = run("--dry-run", "--out", str(tmp_path), "imports", "decode", PYTHONPATH=str(broken.parent))
    assert done.returncode == 1
    report = (tmp_path / "report.md").read_text()
    assert re.search(r"\| imports \|.*\| FAIL: exit code 1 \| \d+ \|", report)
    assert "no kernel image" in report
    assert re.search(r"\| decode \|.*\| pass \| \d+ \|", report)


def test_it_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    assert "no step is called chanel" in run("--dry-run", "--out", str(tmp_path), "chanel").stderr
    done = run("--out", str(tmp_path), "decode", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, "torch sees no GPU" in done.stderr) == (2, True)
