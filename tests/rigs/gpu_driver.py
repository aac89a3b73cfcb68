"""A machine with one GPU and a driver, in which torch sees no device."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncrl.checks import inputs
from asyncrl.devices.device import unseen_gpus

Driver = Callable[[str], None]


def script(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def unseen_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Pretend that nvidia-smi shows a GPU. Returns a function that sets the driver's version."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(inputs, "DRIVERS", (tmp_path,))
    unseen_gpus.cache_clear()

    def has(version: str) -> None:
        script(tmp_path / "bin", "nvidia-smi", f"echo 'NVIDIA H100 80GB HBM3, {version}'")

    return has
