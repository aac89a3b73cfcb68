"""`asyncrl inspect` on what a real run has left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig

pytestmark = pytest.mark.slow
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def asyncrl(*words: str) -> str:
    command = [sys.executable, "-m", "asyncrl", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fetch(address: str) -> tuple[str, bytes]:
    with urllib.request.urlopen(address, timeout=20) as answer:
        return answer.headers["Content-Type"], answer.read()


def test_every_sample_of_a_run_can_be_looked_at(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    config, run = tmp_path / "config.yaml", str(tmp_path / "run")
    config.write_text(dump_config(make_config(data={"val_files": []}, trainer={"max_steps": 3, "samples_per_step": 0})))
    asyncrl("train", str(config))

    rows = [json.loads(line) for line in asyncrl("inspect", run, "--json", "--limit", "100").splitlines()]
    assert len(rows) == 3 * 4 * 4, "steps, prompts per step, group size"
    assert {row["step"] for row in rows} == {1, 2, 3}
    assert all(row["completion"] and row["advantage"] is not None and row["has_payload"] for row in rows)
    of_step = [
        json.loads(line) for line in asyncrl("inspect", run, "--json", "--step", "2", "--order", "worst").splitlines()
    ]
    assert [row["reward"] for row in of_step] == sorted(row["reward"] for row in rows if row["step"] == 2)

    cut = subprocess.run(
        f"'{sys.executable}' -m asyncrl inspect '{run}' --json --limit 100 | head -n 1",
        shell=True, capture_output=True, text=True, env=ENVIRONMENT, timeout=60,
    )  # fmt: skip
    assert (cut.stdout.count("\n"), cut.stderr) == (1, "")

    ticket = of_step[0]["ticket_id"]
    shown = asyncrl("inspect", run, "--ticket", str(ticket), "--colour", "version")
    assert "versions 1 (tokens 1 to" in shown
    assert "PNG" in shown
    group = json.loads(asyncrl("inspect", run, "--ticket", str(ticket), "--json"))
    for one in group["trajectories"]:
        assert len(one["learner_logprobs"]) == one["length"]
        gaps = [abs(a - b) for a, b in zip(one["learner_logprobs"], one["logprobs"], strict=True)]
        assert max(gaps) < 1e-3, "on-policy: both sides agree"
        assert one["levels"]["diff"] == "0" * one["length"]

    serving = subprocess.Popen(
        [sys.executable, "-m", "asyncrl", "inspect", run, "--web", "0", "--order", "worst"],
        stdout=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    try:
        check_page(serving, group)
        serving.terminate()
        assert serving.wait(timeout=20) == 0
    finally:
        serving.kill()
        serving.communicate(timeout=20)


def check_page(serving: subprocess.Popen[str], group: dict[str, Any]) -> None:
    assert serving.stdout is not None
    address = re.match(r"(http://127\.0\.0\.1:\d+/)\?order=worst ", serving.stdout.readline())
    assert address is not None
    kind, page = fetch(address[1])
    assert kind.startswith("text/html")
    assert b"asyncrl" in page
    assert json.loads(fetch(f"{address[1]}api/sample/{group['ticket_id']}")[1]) == group
    kind, image = fetch(f"{address[1]}image/{group['images'][0]['hash']}?ticket={group['ticket_id']}")
    assert kind == "image/png"
    assert len(image) == group["images"][0]["bytes"]
