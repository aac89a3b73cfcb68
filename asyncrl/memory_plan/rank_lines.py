"""Lines of the plan for a learner whose model is divided over ranks (learner.engine)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from asyncrl.config.parts import LEARNER_ENGINES, NCCL_BYTES
from asyncrl.config.schema import RunConfig
from asyncrl.config.service_sections import LearnerConfig
from asyncrl.memory_plan.divided import DividedModel
from asyncrl.memory_plan.items import STEPPING, WORKING, MemoryItem, allocator, count
from asyncrl.memory_plan.rehearsal import ModelBytes
from asyncrl.plugins import implementation

GRADIENTS = "parts of the gradients"
Change = Mapping[str, object]
"""Values of dotted keys."""


@dataclass(frozen=True)
class RankMemory:
    """Formula of the memory of an engine that divides the model (`LearnerEngine.memory`)."""

    lines: Callable[[ModelBytes, RunConfig, str], Iterator[MemoryItem]]
    """Memory of one rank on its device, without its context; the text describes a micro-batch."""
    offloaded: Callable[[ModelBytes, RunConfig], int]
    """Bytes in host memory of one rank with learner.cpu_offload."""
    smaller: Callable[[RunConfig], Iterable[Change]] = lambda config: ()
    """Changes of the engine's own settings that take less memory."""


def memory_of(engine: str) -> RankMemory:
    """The formula of the chosen engine, which divides the model and has one: `rehearse` refuses others."""
    return implementation(LEARNER_ENGINES[engine].memory)


def nccl_of_ranks(learner: LearnerConfig) -> list[MemoryItem]:
    """NCCL memory of a rank on its GPU, awake and asleep."""
    on_gpus = learner.num_processes > 1 and learner.device != "cpu"
    return [MemoryItem("NCCL of the ranks", NCCL_BYTES, "an estimate")] if on_gpus else []


def _fsdp_lines(model: ModelBytes, config: RunConfig, what: str) -> Iterator[MemoryItem]:
    ranks, offloads = config.learner.num_processes, offloads_parts(config.learner)
    if not offloads:
        yield from part_lines(model, config.model.dtype, ranks)
    passing = working = stepping = 0
    scored: list[DividedModel] = [model.divided_reference] if model.divided_reference else []
    for engine in (model, model.critic) if model.critic else (model,):
        assert engine.divided is not None
        passing = max(passing, engine.passing)
        found = engine.divided.working(ranks, engine.passing, engine.in_layers, cpu_offload=offloads)
        working = max(working, found)
        stepping = stepping if offloads else max(stepping, engine.divided.trained_part(ranks))
        scored += [engine.divided] if engine is not model else []
    gathered = working - passing + sum(role.scored(ranks) for role in scored)
    why = "whole weights of two layers, of embeddings and output layer, and a layer's gradients"
    yield MemoryItem("gathered layers", gathered, why)
    yield MemoryItem(WORKING, max(passing, stepping), STEPPING if stepping > passing else what)
    yield allocator(max(working, stepping))


def part_lines(model: ModelBytes, dtype: str, ranks: int) -> Iterator[MemoryItem]:
    """Memory of one rank that outlasts a micro-batch."""
    assert model.divided is not None
    trained = model.divided.trained_part(ranks)
    frozen = "" if model.trained == model.parameters else f", what is frozen in {dtype}"
    kind = f"1/{ranks} of {count(model.parameters)}: what is trained in float32{frozen}"
    yield MemoryItem("parts of the weights", model.divided.part(ranks), kind)
    yield MemoryItem(GRADIENTS, trained, f"1/{ranks} of {count(model.trained)} that are trained, in float32")
    yield MemoryItem("parts of AdamW's moments", 2 * trained, "two averages of each")
    if model.critic and model.critic.divided:
        critic = model.critic.divided
        what = f"1/{ranks} of {count(model.critic.parameters)} with optimiser state"
        yield MemoryItem("parts of the critic", critic.part(ranks) + 3 * critic.trained_part(ranks), what)
    if reference := model.divided_reference:
        what = f"1/{ranks} of its weights, in float32 what is trained of the policy"
        yield MemoryItem("parts of the reference policy", reference.part(ranks), what)


def offloads_parts(learner: LearnerConfig) -> bool:
    """True where parts are in host memory, and the device is another one."""
    return learner.cpu_offload and learner.device != "cpu"


def _fsdp_offloaded(model: ModelBytes, config: RunConfig) -> int:
    return sum(line.nbytes for line in part_lines(model, config.model.dtype, config.learner.num_processes))


FSDP_MEMORY = RankMemory(_fsdp_lines, _fsdp_offloaded)
