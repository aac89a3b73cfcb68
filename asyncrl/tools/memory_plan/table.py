"""A plan as text."""

from __future__ import annotations

from asyncrl.tools.memory_plan.advice import advice, gib
from asyncrl.tools.memory_plan.plan import GIB, Line, MemoryPlan, count

MIB = 2**20
_SHARING = {
    "turns": "one device, in turns (trainer.mode=sync)",
    "together": "one device, both at the same time",
    "apart": "two devices",
}


def describe(plan: MemoryPlan) -> str:
    """The memory table, and whether it fits."""
    config = plan.config
    adapted = f", LoRA of rank {config.model.lora.rank}" if config.model.lora.rank else ""
    head = (
        f"{config.model.path}: {count(plan.learner.parameters)} parameters in {config.model.dtype}{adapted}"
        f"; engine {config.rollout.engine}; {_SHARING[plan.sharing]}"
    )
    unit, size = ("GiB", GIB) if plan.peak >= GIB else ("MiB", MIB)
    parts = [head]
    for phase in plan.phases:
        parts += ["", *_part(phase.name, phase.lines, unit, size), _row("= at most", phase.nbytes / size, "")]
    parts += ["", *_part("host memory", plan.host, unit, size), "", *_verdict(plan)]
    return "\n".join(line.rstrip() for line in parts)


def _verdict(plan: MemoryPlan) -> list[str]:
    if not plan.budget:
        return [
            f"Fits a device of {gib(plan.peak)} and more. Set gpu_memory.budget_gib to have a run refused that does not"
        ]
    if plan.excess:
        return [f"DOES NOT FIT gpu_memory.budget_gib={plan.config.gpu_memory.budget_gib:g}", *advice(plan)]
    return [
        f"Fits gpu_memory.budget_gib={plan.config.gpu_memory.budget_gib:g}, with {gib(plan.budget - plan.peak)} left"
    ]


def _part(name: str, lines: tuple[Line, ...], unit: str, size: int) -> list[str]:
    return [f"  {name.upper():<36}{unit:>9}", *(_row(line.name, line.nbytes / size, line.why) for line in lines)]


def _row(name: str, value: float, why: str) -> str:
    return f"  {name:<36}{value:>9.2f}  {why}"
