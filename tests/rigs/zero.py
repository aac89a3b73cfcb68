"""ZeRO where a test compares it with other engines: the plug-in's settings, if it is installed with DeepSpeed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from asyncrl.plugins import installed

HAS_ZERO = "deepspeed" in installed("learner_engines") and find_spec("deepspeed") is not None


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    """Keys of the `learner` section."""
    if not HAS_ZERO:
        return {"engine": "deepspeed"}
    from asyncrl_plugins.deepspeed.plugin import DeepSpeedConfig

    return {"engine": "deepspeed", "deepspeed": DeepSpeedConfig.model_validate({"zero_stage": stage, **settings})}


def make_small() -> None:
    """Shorten what DeepSpeed leaves whole: else every tensor of a tiny model stays so. For the rigs' processes."""
    if HAS_ZERO:
        from asyncrl_plugins.deepspeed import engine

        engine.PERSISTENT = 500
