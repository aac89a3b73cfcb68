"""`asyncrl train`: check everything cheap first, then run both services under one panel."""

from __future__ import annotations

import sys
from pathlib import Path

from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.launch.panel import Display
from asyncrl.launch.processes import Outcome, Supervisor, service
from asyncrl.launch.story import Story
from asyncrl.rewards.spec import check_rewards
from asyncrl.telemetry.jsonl import write_atomically
from protocol.endpoints import free_port, port_is_free

PORTS = (
    ("network", "control_port"),
    ("network", "weights_port"),
    ("telemetry", "learner_port"),
    ("telemetry", "rollout_port"),
)


def train(config: RunConfig, *, resume: bool) -> int:
    """Run to the end; returns the exit code. Nothing is written before every cheap check has passed."""
    check_run_dir(config, resume=resume)
    check_inputs(config)
    config = resolve_ports(config)
    file = write_config(config)
    flags = ["--resume"] if resume else []
    supervisor = Supervisor(service("learner", config, file, *flags), service("rollout_server", config, file))
    print(f"run directory {config.run_dir}: config.yaml, logs/, metrics.jsonl, samples.jsonl", flush=True)
    with Display(Story(config.run_path)) as display:
        outcome = supervisor.run(display.tick)
    return report(config, outcome)


def check_run_dir(config: RunConfig, *, resume: bool) -> None:
    path = config.run_path
    if resume:
        if not any((path / "checkpoints").glob("step-*")):
            raise UserError(f"--resume: there is no checkpoint in {path / 'checkpoints'}. Start without --resume")
    elif path.exists() and any(path.iterdir()):
        raise UserError(
            f"run_dir {path} exists and is not empty. Continue it with --resume, or set another run_dir=..."
        )


def check_inputs(config: RunConfig) -> None:
    """Mistakes that need no model to be found."""
    if not (Path(config.model.path) / "config.json").is_file():
        raise UserError(f"model.path is {config.model.path!r}, which is no Hugging Face model folder (no config.json)")
    check_rewards(config.reward)


def resolve_ports(config: RunConfig) -> RunConfig:
    """Zeros become free ports; a fixed port must be free."""
    _check_fixed_ports(config)
    chosen = {getattr(getattr(config, section), key) for section, key in PORTS}
    sections: dict[str, dict[str, int]] = {"network": {}, "telemetry": {}}
    for section, key in PORTS:
        port = getattr(getattr(config, section), key)
        while not port:
            found = free_port(getattr(config, section).host)
            port = 0 if found in chosen else found
        chosen.add(port)
        sections[section][key] = port
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=ports) for name, ports in sections.items()}
    )


def _check_fixed_ports(config: RunConfig) -> None:
    """A port that was asked for must be free, and asked for once."""
    owners: dict[int, str] = {}
    for section, key in PORTS:
        host, port = getattr(config, section).host, getattr(getattr(config, section), key)
        if not port:
            continue
        if port in owners:
            raise UserError(f"{owners[port]} and {section}.{key} are both {port}. Set one of them to 0 or another port")
        if not port_is_free(host, port):
            raise UserError(
                f"port {port} on {host} is in use by another process. Set {section}.{key} to another port, or to 0 "
                "to take a free one"
            )
        owners[port] = f"{section}.{key}"


def write_config(config: RunConfig) -> Path:
    """The resolved configuration, as both services read it."""
    config.run_path.mkdir(parents=True, exist_ok=True)
    file = config.run_path / "config.yaml"
    write_atomically(file, dump_config(config).encode())
    return file


def report(config: RunConfig, outcome: Outcome) -> int:
    """Say how it ended and where everything is."""
    if outcome.failed is not None:
        words = outcome.failed.last_words()
        if outcome.code != 2:
            head = (
                f"{outcome.failed.name} ended with code {outcome.failed.code}; the last lines of {outcome.failed.log}:"
            )
            words = f"{head}\n{words}"
        print(words, file=sys.stderr)
        return outcome.code
    if outcome.code == 0:
        print(f"model    {config.run_path / 'export'}")
        print(f"metrics  {config.run_path / 'metrics.jsonl'}")
        print(f"samples  {config.run_path / 'samples.jsonl'}")
    else:
        print(f"interrupted; continue with --resume if {config.run_path / 'checkpoints'} has a checkpoint")
    sys.stdout.flush()
    return outcome.code
