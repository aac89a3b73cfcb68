"""A plan as text."""

from __future__ import annotations

from asyncrl.memory_plan.advice import advice, gib
from asyncrl.memory_plan.plan import GIB, Line, MemoryPlan

_SHARING = {
    "turns": "one device, in turns (trainer.mode=sync)",
    "together": "one device, both at the same time",
    "apart": "two devices",
}


def describe(plan: MemoryPlan) -> str:
    """The memory table, in GiB, and whether it fits."""
    config = plan.config
    adapted = f", LoRA of rank {config.model.lora.rank}" if config.model.lora.rank else ""
    head = (
        f"{config.model.path}: {plan.learner.parameters / 1e9:.3g} billion parameters in {config.model.dtype}{adapted}"
        f"; engine {config.rollout.engine}; {_SHARING[plan.sharing]}"
    )
    parts = [head]
    for phase in plan.phases:
        parts += [
            "",
            _row(phase.name.upper(), "GiB", ""),
            *_rows(phase.lines),
            _row("= at most", _gib(phase.nbytes), ""),
        ]
    parts += ["", _row("HOST MEMORY", "GiB", ""), *_rows(plan.host)]
    parts += ["", *_verdict(plan)]
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


def _rows(lines: tuple[Line, ...]) -> list[str]:
    return [_row(line.name, _gib(line.nbytes), line.why) for line in lines]


def _row(name: str, value: str, why: str) -> str:
    return f"  {name:<36}{value:>9}  {why}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.3f}"
