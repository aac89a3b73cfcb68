"""Refusal of a plan over its budget, and of too little shared memory."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace

from asyncrl.config.changes import changed
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.memory_plan.plan import MemoryPlan, longest_sequence, make_plan, published_versions
from asyncrl.memory_plan.rehearsal import NoPlanError
from asyncrl.telemetry.numbers import GIB, size
from protocol.endpoints import SHARED_MEMORY

logger = logging.getLogger(__name__)

FIX = (
    "Lower batch.tokens_per_microbatch or rollout.max_concurrent_sequences, or set trainer.mode=sync, "
    "learner.gradient_checkpointing=true or model.lora.rank=16: `asyncrl doctor --plan CONFIG` says what each saves"
)


def check_plan(config: RunConfig, device_bytes: int = 0) -> MemoryPlan | None:
    """The plan, or None where nothing limits it. Raises UserError where it cannot fit, before anything is loaded.

    Without a budget the limit is `device_bytes`, the memory of the learner's GPU, for all that happens on it. What
    cannot be planned is then trained unplanned, with a warning.
    """
    if config.batch.tokens_per_microbatch == "auto":  # what fits at all, fits with the least that it may become
        config = changed(config, {"batch.tokens_per_microbatch": longest_sequence(config)})
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
        return f"no {SHARED_MEMORY}: {published_versions(plan.config)} versions of the weights go to a disk"
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
