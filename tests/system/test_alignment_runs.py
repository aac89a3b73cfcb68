"""Two processes: a server that is not aligned gets no work, and the run says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from tests.rigs.small_runs import failure_of, logs, small
from tests.rigs.two_processes import start, with_ports, write_config
from tests.rigs.waiting import exit_codes

MakeConfig = Callable[..., RunConfig]


@pytest.mark.slow
def test_a_run_whose_only_server_is_misaligned_stops_with_the_numbers(make_config: MakeConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    file = write_config(with_ports(small(make_config)), run)
    assert exit_codes([start("learner", file), start("tests.rigs.misaligned_server", file)]) == [3, 2], logs(run)
    for said in (failure_of(run).reason, (run / "tests.rigs.misaligned_server.log").read_text()):
        assert "differ by at most 0.01 nats, 0.01 on average" in said
        assert "row rl.parquet:" in said
    assert "is aligned" not in (run / "learner.log").read_text()
