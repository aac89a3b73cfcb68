"""`asyncrl doctor --plan`: the memory table of a configuration or of a model folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig


def memory_table(target: Path, overrides: Sequence[str]) -> str:
    """Of a configuration, or of a model folder with the default settings."""
    from asyncrl.tools.memory_plan.plan import make_plan
    from asyncrl.tools.memory_plan.table import describe

    return describe(make_plan(_planned(target, overrides)))


def _planned(target: Path, overrides: Sequence[str]) -> RunConfig:
    if not target.is_dir():
        return load_config(target, overrides)
    defaults = (
        f"model.path={target}",
        f"model.dtype={_stored_dtype(target)}",
        "run_dir=plan",
        "data.train_files=[plan]",
        "reward.functions=[{function: exact_match}]",
    )
    return load_config(Path(os.devnull), [*defaults, *overrides])


def _stored_dtype(folder: Path) -> str:
    """Of the weights in the folder, as far as we train in it."""
    from asyncrl.config.model import ModelConfig
    from asyncrl.models.folder import read_config

    described = read_config(ModelConfig(path=str(folder)))
    text = described.get("text_config") or {}
    names = [str(d.get(key)) for d in (described, text) for key in ("dtype", "torch_dtype")]
    return "bfloat16" if any("16" in name for name in names) else "float32"
