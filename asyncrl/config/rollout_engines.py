"""Rollout engines by name: those of the core, and those of plug-ins (`asyncrl.rollout_engines`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.plugins import Part, descriptions, require_part


@dataclass(frozen=True, kw_only=True)
class RolloutEngine(Part):
    """Description of a rollout engine. Its implementation has the methods of `rollout_server.engines.base`."""

    machine_problems: str = ""
    """`module:function`, called with the configuration before the engine is made. It returns a line, with its fix, for
    each thing that this machine or model lacks."""
    installation: str = ""
    """`module:function`, called without arguments. It returns a line for `asyncrl doctor`: versions found, or the
    command that installs the engine."""
    unserved: Callable[[Mapping[str, Any]], str] = lambda described: ""
    """Part of a model, by its config.json, that the engine has no code for; empty if it has all."""
    memory: str = "asyncrl.memory_plan.engine_memory:HF_MEMORY"
    """`module:name` of its `asyncrl.memory_plan.engine_memory.EngineMemory`; that of the hf engine unless given."""
    has_model: bool = True
    """False for an engine that makes its tokens up."""
    spans_devices: bool = False
    """True if it spreads one model over several devices (rollout.tensor_parallel_size)."""
    compiles: bool = False
    """True if its first start on a GPU may compile for many minutes."""
    not_quantized: str = "which has none"
    """Reason, as half a sentence, for an engine that samples with the learner's own weights only."""
    metric_prefix: str = ""
    """Prefix of its own Prometheus metrics, which the server's endpoint shows, too."""


BUILT_IN: Mapping[str, RolloutEngine] = {
    "hf": RolloutEngine(implementation="rollout_server.engines.hf.engine:HFEngine"),
    "scripted": RolloutEngine(
        implementation="rollout_server.engines.scripted:ScriptedEngine",
        has_model=False,
        not_quantized="which has no model",
    ),
}
"""Engines of the core. asyncrl/config/engine_rules.py has the configurations that they refuse."""


def rollout_engine(name: str) -> RolloutEngine:
    """Raises ValueError for a name that neither the core nor an installed plug-in has."""
    return require_part("rollout_engines", name, BUILT_IN, "rollout.engine")


def rollout_engines() -> dict[str, RolloutEngine]:
    """Descriptions of all engines, those of installed plug-ins last."""
    return {**BUILT_IN, **descriptions("rollout_engines")}
