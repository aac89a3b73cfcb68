"""The configuration that a run is made with, in its directory: what inspect, replay, report and --resume read."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.jsonl import write_atomically
from asyncrl.telemetry.recorder import CONFIG_FILE


def save_config(config: RunConfig, name: str = CONFIG_FILE) -> Path:
    """Write the resolved configuration. Raises OSError where it cannot be written."""
    file = config.run_path / name
    text = dump_config(config).encode()
    if not file.is_file() or file.read_bytes() != text:
        config.run_path.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)
    return file
