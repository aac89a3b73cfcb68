"""Two processes: a server that is not aligned gets no work, and the run says why."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from tests.rigs.small_runs import failure_of, logs, small
from tests.rigs.two_processes import start, with_ports, write_config
from tests.rigs.waiting import exit_codes, wait_until

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


@pytest.mark.slow
def test_a_late_misaligned_server_is_refused_and_a_late_good_one_is_not(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = with_ports(
        make_config(learner={"max_staleness": 1}, trainer={"max_steps": 100_000, "samples_per_step": 0})
    )
    file = write_config(config, run)
    telemetry = config.telemetry.model_copy(update={"rollout_port": 0})
    other = write_config(config.model_copy(update={"telemetry": telemetry}), tmp_path / "other")
    learner, good = start("learner", file), start("rollout_server", file)
    services = [learner, good]
    try:
        wait_until(lambda: (run / "metrics.jsonl").exists(), "the first step", run)
        services.append(bad := start("tests.rigs.misaligned_server", other))
        assert bad.wait(timeout=60) == 2, logs(tmp_path / "other")
        assert (
            "the learner refuses this server" in (tmp_path / "other" / "tests.rigs.misaligned_server.log").read_text()
        )
        services.append(late := start("rollout_server", other))
        learner_log = run / "learner.log"
        wait_until(lambda: learner_log.read_text().count("is aligned") == 2, "the good one", run)
        steps = len((run / "metrics.jsonl").read_bytes().splitlines())
        wait_until(lambda: len((run / "metrics.jsonl").read_bytes().splitlines()) > steps + 5, "5 more steps", run)
        endpoint = f"http://127.0.0.1:{config.telemetry.learner_port}/metrics"
        with urllib.request.urlopen(endpoint, timeout=5) as answer:
            metrics = answer.read().decode()
        largest = [line.split() for line in metrics.splitlines() if line.startswith("asyncrl_learner_parity_max{")]
        assert [float(value) < 1e-4 for _, value in largest] == [True, True], "of the servers that are here"
        assert 'asyncrl_learner_errors_total{kind="parity"} 1.0' in metrics, "of the one that is not"
        learner.terminate()
        assert [service.wait(timeout=60) for service in (learner, good, late)] == [130, 4, 4], logs(run)
    finally:
        for service in services:
            service.kill()
