"""`asyncrl demo --from-scratch`, whose warm start is made by `asyncrl sft`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.two_processes import start_command
from tests.system.test_demo import QUICK, check_scored_demo


@pytest.mark.slow
def test_the_demo_from_nothing_makes_its_warm_start_too(tmp_path: Path) -> None:
    demo, log = tmp_path / "demo", tmp_path / "log"
    command = start_command("demo", "--from-scratch", "--folder", str(demo), *QUICK, log=log)
    assert command.wait(timeout=300) == 0, log.read_text()
    check_scored_demo(demo, log.read_text(), ["data", "model", "sft", "baselines", "grpo", "check"])
    made = (demo / "sft" / "export" / "model.safetensors").read_bytes()
    assert (demo / "warm_start" / "model.safetensors").read_bytes() == made
