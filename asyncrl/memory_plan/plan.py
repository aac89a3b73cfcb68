"""The memory plan: memory of each device while learner or engine works."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from asyncrl.config.parts import ROLLOUT_ENGINES, WEIGHT_CHANNELS
from asyncrl.config.schema import RunConfig, changed
from asyncrl.config.sections import DataConfig
from asyncrl.config.service_sections import LearnerConfig, ReferenceConfig, RolloutConfig
from asyncrl.devices.device import resolve_dtype, visible_gpus
from asyncrl.devices.gpu_assignment import assign_gpus
from asyncrl.errors import UserError
from asyncrl.memory_plan import GIB, size
from asyncrl.memory_plan.lines import (
    WORKING,
    MemoryItem,
    allocator,
    context,
    count,
    memory_of,
    memory_of_engine,
    nccl_of_ranks,
    servers_text,
)
from asyncrl.memory_plan.rehearsal import ModelBytes, NoPlanError, rehearse
from protocol.endpoints import SHARED_MEMORY

logger = logging.getLogger(__name__)

Sharing = Literal["turns", "together", "apart"]
"""How learner and engine share a device: one after the other (sync mode), at the same time, or not at all."""
FIX = (
    "Lower batch.tokens_per_microbatch or rollout.max_concurrent_sequences, or set trainer.mode=sync, "
    "learner.gradient_checkpointing=true or model.lora.rank=16: `asyncrl doctor --plan CONFIG` says what each saves"
)


@dataclass(frozen=True)
class Phase:
    """Peak memory of one device in one phase."""

    name: str
    lines: tuple[MemoryItem, ...]

    @property
    def nbytes(self) -> int:
        return sum(line.nbytes for line in self.lines)


@dataclass(frozen=True)
class MemoryPlan:
    config: RunConfig
    model: ModelBytes
    sharing: Sharing
    phases: tuple[Phase, ...]
    """Each is of one device, and must fit the budget."""

    @property
    def budget(self) -> int:
        """Bytes; 0 where there is none."""
        return int(self.config.gpu_memory.budget_gib * GIB)

    @property
    def peak(self) -> int:
        return max(phase.nbytes for phase in self.phases)

    @property
    def excess(self) -> int:
        """Bytes over the budget, of all phases together; 0 without one."""
        return sum(max(0, phase.nbytes - self.budget) for phase in self.phases) if self.budget else 0

    @property
    def versions(self) -> int:
        """Most published versions in shared memory at a time (protocol/weights.py): the newest two, one that a slow
        server may have mapped, and one that is evaluated beside training."""
        return 3 + self.config.evaluates_beside_training

    @property
    def publications(self) -> int:
        """Bytes of published versions in shared memory."""
        return self.versions * self.model.published


def make_plan(config: RunConfig, model: ModelBytes | None = None) -> MemoryPlan:
    """Make the plan, with model.dtype as it is meant on this machine, reusing `model` if it was measured.

    Raises UserError for what is no model.
    """
    config = resolve_dtype(config)
    most = config.batch.prompts_per_step * (
        config.data.max_prompt_length + config.trajectories_per_group * config.data.max_response_length
    )
    # No pass has more than all of a step, whatever a micro-batch may hold.
    config = changed(config, {"batch.tokens_per_microbatch": min(config.batch.microbatch_tokens, most)})
    model = model or rehearse(config)
    sharing = device_sharing(config)
    each = f", each of {config.learner.num_processes} ranks" if config.learner.num_processes > 1 else ""
    learning = Phase(f"learner awake{each}", tuple(learner_lines(model, config)))
    if not ROLLOUT_ENGINES[config.rollout.engine].has_model:
        return MemoryPlan(config, model, sharing, (learning,))
    engine, copies = memory_of_engine(config.rollout.engine), servers_per_gpu(config)
    contexts = context(config.rollout.device, "rollout server", copies)
    arriving = arriving_lines(model, config.rollout, copies)
    sampling = Phase("engine awake", (*engine.lines(model, config, copies), *contexts, *arriving))
    if sharing == "together":
        phases = [Phase("learner and engine at the same time", learning.lines + sampling.lines)]
    elif sharing == "apart":
        phases = [learning, sampling]
    else:  # a process that sleeps leaves its context
        learner_asleep = (*context(config.learner.device, "learner"), *nccl_of_ranks(config.learner))
        phases = [
            Phase(learning.name, (*learning.lines, *contexts, *engine.asleep(config))),
            Phase(sampling.name, (*sampling.lines, *learner_asleep)),
        ]
    return MemoryPlan(config, model, sharing, tuple(phases))


def device_sharing(config: RunConfig) -> Sharing:
    if config.trainer.mode == "sync":
        return "turns"
    assigned = assign_gpus(config, len(visible_gpus()))
    if assigned.learner and assigned.servers_per_gpu:
        return "together" if assigned.is_shared_with_learner else "apart"
    return "together" if config.on_one_device(cuda=torch.cuda.is_available()) else "apart"


def engine_fills(config: RunConfig) -> bool:
    """Whether an engine at work beside the learner takes what both leave for its cache."""
    return device_sharing(config) == "together" and memory_of_engine(config.rollout.engine).fills_device


def servers_per_gpu(config: RunConfig) -> int:
    """Most servers on one GPU of this machine; all of them where it has none."""
    gpus = visible_gpus()
    return (assign_gpus(config, len(gpus)).servers_per_gpu if gpus else 0) or config.rollout.servers


def learner_lines(model: ModelBytes, config: RunConfig) -> Iterator[MemoryItem]:
    what = f"forward and backward of {config.batch.microbatch_tokens} tokens (batch.tokens_per_microbatch, or a step)"
    if config.learner.is_divided:
        yield from memory_of(config.learner.engine).lines(model, config, what)
        yield from nccl_of_ranks(config.learner)
    else:
        yield from _whole_lines(model, config.learner, config.reference, config.model.dtype, what)
    yield from context(config.learner.device, "learner")
    why = "the newest version, and one that is still being sent"
    sent = MemoryItem("weights that are sent", 2 * model.published, why)
    yield from _over_channel(config.rollout, sent, "learner", config.rollout.servers)


def _whole_lines(
    model: ModelBytes, learner: LearnerConfig, reference: ReferenceConfig, dtype: str, what: str
) -> Iterator[MemoryItem]:
    engines = (model, model.critic) if model.critic else (model,)  # one at a time is at work
    passing = max(engine.passing for engine in engines)
    offloads = learner.offloads_masters
    less = f", {size(fewer)} less by model.quantization" if (fewer := model.weights - model.held) else ""
    yield MemoryItem("weights", model.held, f"{count(model.parameters)} in {dtype}{less}")
    if not offloads:
        yield MemoryItem("gradients", model.gradients, f"{count(model.trained)} are trained, gradients in float32")
        in_8_bits = ", of 8 bits where a tensor is not small" if learner.optimizer == "adamw_8bit" else ""
        if model.masters:
            yield MemoryItem("master weights", model.masters, f"float32 copies of what is trained in {dtype}")
        yield MemoryItem("AdamW moments", model.moments, f"two averages of each{in_8_bits}")
    if critic := model.critic:
        held = critic.weights if offloads else critic.kept + critic.gradients
        yield MemoryItem("critic", held, f"{count(critic.parameters)}{'' if offloads else ' with optimiser state'}")
    if model.reference:
        why = "weights and their moving averages" if reference.ema else "weights"
        why += "; none with adapters and without reference.path"
        held = model.reference
        if reference.offload:  # no gradient is there before the first micro-batch and after the update
            held = max(0, held - (0 if offloads else model.gradients))
            why = "what it needs, while it scores, beyond the place of the gradients (reference.offload)"
        yield MemoryItem("reference policy", held, why)
    yield MemoryItem(WORKING, passing, what)
    yield allocator(passing)


def arriving_lines(model: ModelBytes, rollout: RolloutConfig, copies: int) -> Iterator[MemoryItem]:
    """Memory of incoming weights: a device channel needs one full version per worker, whatever part it has."""
    why = "a whole version, beside the model" + servers_text(copies)
    arriving = MemoryItem("weights that arrive", copies * model.published, why)
    yield from _over_channel(rollout, arriving, "rollout server", copies)


def _over_channel(rollout: RolloutConfig, weights: MemoryItem, process: str, servers: int) -> Iterator[MemoryItem]:
    """Memory of a device channel (docs/decisions/013): the weights, and its own for each server."""
    channel = rollout.weights_channel
    if not rollout.uses_device_channel:
        return
    yield replace(weights, why=f"rollout.weights_channel={channel}: {weights.why}")
    if own := WEIGHT_CHANNELS[channel].own_bytes:
        yield MemoryItem(f"{channel} of the {process}", servers * own, "an estimate" + servers_text(servers))


def longest_sequence(data: DataConfig) -> int:
    return data.max_prompt_length + data.max_response_length


def check_plan(config: RunConfig, device_bytes: int = 0) -> MemoryPlan | None:
    """The plan, or None where nothing limits it. Raises UserError where it cannot fit, before anything is loaded.

    Without a budget the limit is `device_bytes`, the memory of the learner's GPU, for all that happens on it. What
    cannot be planned is then trained unplanned, with a warning.
    """
    if config.batch.tokens_per_microbatch == "auto":  # what fits at all, fits with the least that it may become
        config = changed(config, {"batch.tokens_per_microbatch": longest_sequence(config.data)})
    if config.gpu_memory.budget_gib:
        plan, limit = make_plan(config), f"gpu_memory.budget_gib is {config.gpu_memory.budget_gib:g}"
    elif device_bytes:
        try:
            plan = make_plan(changed(config, {"gpu_memory.budget_gib": device_bytes / GIB}))
        except NoPlanError as problem:
            logger.warning("%s", problem)
            return None
        if plan.sharing == "apart":
            plan = replace(plan, phases=plan.phases[:1])
        limit = f"the learner's GPU has {size(device_bytes)}"
    else:
        return None
    if plan.excess:
        raise UserError(refusal(plan, limit))
    return plan


def check_shared_memory(plan: MemoryPlan) -> str:
    """Describe the room for published weights in /dev/shm; UserError if there is too little, as in containers."""
    if not SHARED_MEMORY.is_dir():
        return f"no {SHARED_MEMORY}: {plan.versions} versions of the weights go to a disk"
    free = shutil.disk_usage(SHARED_MEMORY).free
    text = f"published weights need {size(plan.publications)} in {SHARED_MEMORY}, which has {size(free)} free"
    if free < plan.publications:
        gib = -(-plan.publications // GIB) + 1
        raise UserError(
            f"{text}. In a container set --shm-size={gib}g (compose: ASYNCRL_SHM_SIZE={gib}g), else "
            f"mount -o remount,size={gib}g {SHARED_MEMORY}"
        )
    return text


def refusal(plan: MemoryPlan, limit: str) -> str:
    """Name the phases that do not fit within the limit, with their largest parts, and the fix."""
    lines: list[str] = []
    for phase in (phase for phase in plan.phases if phase.nbytes > plan.budget):
        parts = sorted(phase.lines, key=lambda line: -line.nbytes)[:4]
        largest = ", ".join(f"{part.name} {part.nbytes / GIB:.1f}" for part in parts)
        lines.append(f"{limit}, but the {phase.name} needs {size(phase.nbytes)} ({largest}, ...)")
    return "\n".join([*lines, FIX])
