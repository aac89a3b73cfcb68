"""README's first command, in small: what `make demo` runs once there is an environment."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.cli import main
from tests.rigs.docs_commands import ROOT

DRAWN_PORTS = (
    "network.control_port=0",
    "network.weights_port=0",
    "telemetry.learner_port=0",
    "telemetry.rollout_port=0",
)


@pytest.mark.slow
def test_the_demo_from_nothing_to_a_checked_export(tmp_path: Path) -> None:
    demo = re.search(r"^demo: install\n\t\$\(BIN\)/asyncrl (.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert demo
    small = ["--quick", "--steps", "3", "--folder", str(tmp_path / "demo")]
    ran = subprocess.run(
        [sys.executable, "-m", "asyncrl", *demo[1].split(), *small, *DRAWN_PORTS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert set(summary["seconds"]) == {"data", "model", "sft", "grpo", "check"}
    assert summary["held_out_rows"] == 32
    (checked,) = re.findall(r"^pass@1 ([\d.]+) .* rows 32 .* errors 0$", ran.stdout, re.M)
    assert checked == f"{summary['accuracy_after']:.4f}", "plain transformers agrees"
    assert f"held-out accuracy {summary['accuracy_before']:.3f} -> {summary['accuracy_after']:.3f}" in ran.stdout
    assert (tmp_path / "demo" / "grpo" / "export" / "model.safetensors").is_file()


def test_a_mistake_is_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--folder", "demo", "--steps=-3"]) == 2
    assert "trainer.max_steps is -3" in capsys.readouterr().err
    assert main(["demo", "run_dir=elsewhere"]) == 2
    assert not list(tmp_path.iterdir())
