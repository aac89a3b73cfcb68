"""`asyncrl train`: check everything cheap first, then run both services under one panel."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from asyncrl.data.dataset import Purpose, open_train, open_validation
from asyncrl.errors import UserError
from asyncrl.launch.panel import MISSING, Display, number
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
    with Display(Story(config.run_path, since=time.time())) as display:
        outcome = supervisor.run(display.tick)
    return report(config, outcome, display.story)


def check_run_dir(config: RunConfig, *, resume: bool) -> None:
    """A new run needs an empty or absent directory, a resumed one a checkpoint in it."""
    path = config.run_path
    if path.exists() and not path.is_dir():
        raise UserError(f"run_dir {path} is a file. Set another run_dir=...")
    in_use, resumable = path.exists() and any(path.iterdir()), has_checkpoint(path)
    fix = "Remove it or set another run_dir=..." if in_use else "Start without --resume"
    if resume and not resumable:
        raise UserError(f"--resume: there is no checkpoint in {path / 'checkpoints'}. {fix}")
    if in_use and not resume:
        found = "Continue it with --resume, or" if resumable else "It has no checkpoint for --resume: remove it, or"
        raise UserError(f"run_dir {path} exists and is not empty. {found} set another run_dir=...")


def has_checkpoint(run_path: Path) -> bool:
    return any((run_path / "checkpoints").glob("step-*"))


def check_inputs(config: RunConfig, purpose: Purpose = "rl") -> None:
    """Mistakes that need no model to be found, so that they leave no run directory behind."""
    if not (Path(config.model.path) / "config.json").is_file():
        raise UserError(f"model.path is {config.model.path!r}, which is no Hugging Face model folder (no config.json)")
    check_rewards(config.reward)
    open_train(config.data, purpose)
    if purpose == "rl":
        open_validation(config.data)


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
    file = config.run_path / "config.yaml"
    try:
        config.run_path.mkdir(parents=True, exist_ok=True)
        write_atomically(file, dump_config(config).encode())
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}. Set another run_dir=...") from None
    return file


def report(config: RunConfig, outcome: Outcome, story: Story) -> int:
    """Say how it ended and where everything is."""
    if outcome.failed is not None:
        words = outcome.failed.last_words()
        if outcome.code != 2:
            words = f"{outcome.failed.ending()}; the last lines of {outcome.failed.log}:\n{words}"
        print(words, file=sys.stderr)
        return outcome.code
    if outcome.code == 0:
        if story.evaluations:
            before, after = story.evaluations[0], story.evaluations[-1]
            course = [number(e.get("accuracy")) for e in ((before, after) if after is not before else (after,))]
            print(f"held-out accuracy {' -> '.join(course)} over {after.get('rows', MISSING)} rows")
        print(f"model    {config.run_path / 'export'}")
        print(f"metrics  {config.run_path / 'metrics.jsonl'}")
        print(f"samples  {config.run_path / 'samples.jsonl'}")
    elif has_checkpoint(config.run_path):
        print("interrupted; the same command with --resume continues from the newest checkpoint")
    else:
        print("interrupted before the first checkpoint (trainer.save_freq), so there is nothing to resume")
    sys.stdout.flush()
    return outcome.code
