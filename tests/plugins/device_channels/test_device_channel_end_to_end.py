"""The real services over a device channel, on the CPU: a server dies while weights arrive, and the run goes on."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.jsonl import read_lines
from tests.rigs.prefork import Service
from tests.rigs.small_runs import assert_every_prompt_trained_once, logs
from tests.rigs.two_processes import start, with_ports, write_config

pytestmark = pytest.mark.slow
SERVER = "tests.plugins.device_channels.gloo_server"


def prepare(make_config: Callable[..., RunConfig], run: Path, steps: int, **sections: dict[str, int]) -> Path:
    config = make_config(
        trainer={"max_steps": steps, "samples_per_step": 0},
        data={"val_files": []},
        network={"control_port": 0, "weights_port": 0, "heartbeat_s": 0.2, "timeout_s": 5.0},
        **sections,
    )
    return write_config(with_ports(config), run)


@contextmanager
def ended(*services: Service) -> Iterator[list[Service]]:
    """Services that are gone after the block, and those that it adds."""
    running = list(services)
    try:
        yield running
    finally:
        for service in running:
            service.kill()
            service.wait()


def test_a_server_that_dies_while_weights_arrive_is_replaced_and_the_run_finishes(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    file = prepare(make_config, run, 6)
    with ended(start("learner", file), start(SERVER, file, crash_at="weights.receiving:3")) as services:
        assert services[1].wait(timeout=60) == -signal.SIGKILL, logs(run)
        assert 0 < len(steps(run)) < 6
        services.append(start(SERVER, file))
        assert [services[0].wait(timeout=60), services[2].wait(timeout=30)] == [0, 0], logs(run)
    assert_every_prompt_trained_once(run, steps=6)
    assert all(step["ledger_residual"] == 0 for step in steps(run))
    assert "weights over nccl" in (run / f"{SERVER}.log").read_text()


def test_auto_with_a_budget_goes_on_over_another_channel_and_the_run_finishes(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The learner sends nothing from a device whose memory is planned without that."""
    run = tmp_path / "run"
    file = prepare(make_config, run, 3, gpu_memory={"budget_gib": 64})
    with ended(start("learner", file), start(SERVER, file)) as services:
        assert [service.wait(timeout=60) for service in services] == [0, 0], logs(run)
    assert_every_prompt_trained_once(run, steps=3)
    log = (run / f"{SERVER}.log").read_text()
    assert "this learner sends nothing over nccl" in log
    assert log.count("From now on weights come over shm") == 1


def steps(run: Path) -> list[dict[str, float]]:
    return read_lines(run / "metrics.jsonl")
