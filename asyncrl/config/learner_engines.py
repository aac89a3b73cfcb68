"""Training engines by name: those of the core, and those of plug-ins (`asyncrl.learner_engines`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.plugins import Part, descriptions, require_part


@dataclass(frozen=True, kw_only=True)
class LearnerEngine(Part):
    """Description of a training engine.

    Its implementation is called with the `learner` section, the device and the ranks, and returns a
    `learner.training.sharding.Sharding`.
    """

    divides_model: bool = True
    """True if each rank has a part of the weights, of the optimiser's state or of both."""
    memory: str = ""
    """`module:name` of its `asyncrl.memory_plan.rank_lines.RankMemory`; empty: its memory cannot be planned."""


BUILT_IN: Mapping[str, LearnerEngine] = {
    "torch": LearnerEngine(implementation="learner.training.sharding:one_device", divides_model=False),
    "fsdp2": LearnerEngine(
        implementation="learner.training.fsdp:fully_sharded",
        memory="asyncrl.memory_plan.rank_lines:FSDP_MEMORY",
    ),
}


def learner_engine(name: str) -> LearnerEngine:
    """Raises ValueError for a name that neither the core nor an installed plug-in has."""
    return require_part("learner_engines", name, BUILT_IN, "learner.engine")


def learner_engines() -> dict[str, LearnerEngine]:
    """Descriptions of all engines, those of installed plug-ins last."""
    return {**BUILT_IN, **descriptions("learner_engines")}
