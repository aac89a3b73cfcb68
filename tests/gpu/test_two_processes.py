"""`asyncrl train` with learner and server on one device, which divide its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.jsonl import read_lines
from tests.rigs.small_runs import assert_every_prompt_trained_once, logs, small
from tests.rigs.two_processes import start_command, write_config

pytestmark = pytest.mark.slow
STEPS = 8


@pytest.mark.parametrize(
    ("device", "rollout"),
    [
        pytest.param("cpu", {}, id="cpu"),
        pytest.param("cuda", {}, id="cuda", marks=pytest.mark.gpu),
        pytest.param("cuda", {"quantization": "int8"}, id="cuda-int8", marks=pytest.mark.gpu),
        pytest.param("cuda", {"quantization": "fp8"}, id="cuda-fp8", marks=pytest.mark.gpu),
    ],
)
def test_both_share_a_device_and_micro_batches_take_what_it_leaves(
    make_config: Callable[..., RunConfig], tmp_path: Path, device: str, rollout: dict[str, Any]
) -> None:
    config = small(
        make_config,
        model={"dtype": "float32" if device == "cpu" else "bfloat16"},
        batch={"tokens_per_microbatch": "auto"},
        learner={"device": device, "max_staleness": 2},
        rollout={"device": device, **rollout},
        gpu_memory={"budget_gib": 0.05 if device == "cpu" else 8.0},
        trainer={"max_steps": STEPS},
    )
    file, log = write_config(config, tmp_path), tmp_path / "train.log"
    if device == "cpu":
        code = start_command("train", str(file), log=log).wait(timeout=240)
    else:  # no fork of a process that may have looked at its devices
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "asyncrl", "train", str(file)]
        with log.open("wb") as output:
            code = subprocess.run(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=240
            ).returncode
    assert code == 0, logs(tmp_path)
    run = Path(config.run_dir)
    assert_every_prompt_trained_once(run, STEPS)
    lines = read_lines(run / "metrics.jsonl")
    assert "tokens_per_microbatch: auto is" in logs(run / "logs", whole=True)
    limit = 1e-6 if device == "cpu" else 0.02
    assert max(line["staleness_0/mismatch_kl_k3"] for line in lines if "staleness_0/mismatch_kl_k3" in line) < limit
