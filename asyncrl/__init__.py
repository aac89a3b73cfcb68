"""Asynchronous reinforcement learning for vision-language models.

    run = asyncrl.train("config.yaml", reward=my_reward, data=rows)
    run.metrics, run.best(3), run.export("my-model")

`asyncrl.RunConfig` is the typed configuration. Names are imported when they are used: none loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.api.run import Run as Run
    from asyncrl.api.run import load as load
    from asyncrl.api.training import train as train
    from asyncrl.config.schema import RunConfig as RunConfig

_PLACES = {
    "Run": "asyncrl.api.run",
    "load": "asyncrl.api.run",
    "train": "asyncrl.api.training",
    "RunConfig": "asyncrl.config.schema",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'asyncrl' has no attribute {name!r}. It has {', '.join(_PLACES)}")


def __dir__() -> list[str]:
    return [*globals(), *_PLACES]
