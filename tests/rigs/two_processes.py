"""Start the two real services on free ports, and wait for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from protocol.faults import SLOW_VARIABLE, VARIABLE
from tests.rigs.ports import own_port
from tests.rigs.prefork import RUN_FIRST, Service, fork_module
from tests.rigs.waiting import exit_codes


def with_ports(config: RunConfig, port: Callable[[], int] = own_port) -> RunConfig:
    """Ports in place of zeros. For a launcher, which claims its own, `port` is free_port."""
    network = config.network.model_copy(update={"control_port": port(), "weights_port": port()})
    telemetry = config.telemetry.model_copy(update={"learner_port": port(), "rollout_port": port()})
    return config.model_copy(update={"network": network, "telemetry": telemetry})


def start(
    module: str,
    config_file: Path,
    *arguments: str,
    crash_at: str = "",
    slow_at: str = "",
    first: str = "",
    of_this: bool = False,
) -> Service:
    """A service; with `crash_at` it dies by SIGKILL at that place, with `slow_at` it is slow there (see
    protocol/faults.py). `first` is a file that it runs before it begins. `of_this`: a fork of this process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {VARIABLE: crash_at, SLOW_VARIABLE: slow_at}
    if first:
        environment[RUN_FIRST] = first
    log = config_file.parent / f"{module}.log"
    return fork_module(module, ["--config", str(config_file), *arguments], log, environment, of_this=of_this)


def start_command(*arguments: str, log: Path, of_this: bool = False) -> Service:
    """`asyncrl ARGUMENTS`, which writes what it prints to `log`. The services that it launches are forked, too.
    `of_this`: a fork of this process."""
    log.unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return fork_module("asyncrl", arguments, log, environment, of_this=of_this)


def write_config(config: RunConfig, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(dump_config(config))
    return path


def run_both(config: RunConfig, folder: Path, *, timeout_s: float = 120.0) -> tuple[int, int]:
    """Exit codes of learner and rollout server; both are gone on return."""
    file = write_config(with_ports(config), folder)
    learner, server = exit_codes([start("learner", file), start("rollout_server", file)], timeout_s)
    return learner, server
