"""Asynchronous reinforcement learning for vision-language models.

    run = asyncrl.train("config.yaml", reward=my_reward, data=rows)

Names of a plug-in (entry point group `asyncrl.names`) are imported when they are used; none loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name == "plugins":  # what Python asks of a module, and its import of the next line
        raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")
    plugins = import_module("asyncrl.plugins")
    there = plugins.installed("names")
    if name in there:
        return plugins.implementation(there[name].value)
    others = f"It has {', '.join(there)}" if there else plugins.what_to_install("names")
    raise AttributeError(f"module 'asyncrl' has no attribute {name!r}. {others}")
