"""A whole run whose two processes find each other with keys, weights over the encrypted socket included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.jsonl import read_lines
from tests.rigs.curve_keys import make_keys
from tests.rigs.two_processes import run_both


@pytest.mark.slow
def test_a_run_with_keys_trains_and_writes_no_key(make_config: Callable[..., RunConfig], tmp_path: Path):
    keys = tmp_path / "keys"
    make_keys(keys)
    network = {"keys_dir": str(keys)}
    config = make_config(model={"dtype": "bfloat16"}, network=network, rollout={"weights_channel": "zmq"})
    assert run_both(config, tmp_path) == (0, 0), "\n".join(p.read_text()[-2000:] for p in tmp_path.glob("*.log"))
    steps = read_lines(config.run_path / "metrics.jsonl")
    assert steps[-1]["step"] == 3
    secrets = [path.read_bytes().strip() for path in keys.rglob("*") if path.is_file()]
    written = [path for path in tmp_path.rglob("*") if path.is_file() and keys not in path.parents]
    assert len(written) > 5
    for path in written:
        data = path.read_bytes()
        assert not any(secret in data for secret in secrets), path
