"""The GPUs of each process of an asynchronous run: the learner has one for each of its ranks (learner.num_processes),
each server as many as its tensor parallelism.

A process that is alone on its GPUs sees no others (CUDA_VISIBLE_DEVICES): vLLM takes the first of those that it sees,
and 0.92 of each, unless it has a budget. GPUs are numbers here, places in the list of those that the launcher sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.config.parts import ROLLOUT_ENGINES, WEIGHT_CHANNELS
from asyncrl.config.run_sections import RunSections
from asyncrl.config.sections import component_name
from asyncrl.config.service_sections import meant_device
from asyncrl.errors import UserError
from asyncrl.plugins import description, installed

GPUS_VARIABLE = "ASYNCRL_GPUS"
"""The GPUs that the launcher assigned from, in the environment of the processes that it starts: what they plan
together depends on what all of them have."""


@dataclass(frozen=True)
class GpuAssignment:
    learner: tuple[int, ...]
    """One of each rank; empty on a CPU."""
    servers: tuple[tuple[int, ...], ...]
    """The GPUs of each server; empty ones on a CPU."""

    @property
    def is_shared_with_learner(self) -> bool:
        return any(set(self.learner) & set(gpus) for gpus in self.servers)

    @property
    def servers_per_gpu(self) -> int:
        """Most servers on one GPU; 0 without any."""
        return max(Counter(gpu for gpus in self.servers for gpu in gpus).values(), default=0)


def assign_gpus(config: RunSections, count: int) -> GpuAssignment:
    """Assign `count` GPUs. The learner's comes first; servers that find too few of the others share GPUs evenly.

    A device that is named with its number is taken as it is, by all servers. In sync mode, and for a channel within
    one GPU, all processes are on the learner's GPUs. The GPU of a reward's model is left to it where there are others.
    """
    rollout, kept = config.rollout, reward_gpus(config)
    learner_works, servers_work = (
        meant_device(name, cuda=count > 0) != "cpu" for name in (config.learner.device, rollout.device)
    )
    servers_work = servers_work and ROLLOUT_ENGINES[rollout.engine].has_model
    width = rollout.tensor_parallel_size
    learner_named, rollout_named = _number(config.learner.device), _number(rollout.device)
    named = () if rollout_named is None else tuple(range(rollout_named, rollout_named + width))
    free = [gpu for gpu in range(count) if gpu not in named and gpu not in kept]
    if config.trainer.mode == "sync" or WEIGHT_CHANNELS[rollout.weights_channel].on_one_gpu:
        free = list(named) or free
    wanted = [gpu for gpu in (learner_named, *free) if gpu is not None][: config.learner.num_processes] or [0]
    mine = tuple(wanted) if learner_works else ()
    if config.trainer.mode == "sync" or WEIGHT_CHANNELS[rollout.weights_channel].on_one_gpu:
        theirs = [named or mine or (0,)]
    elif named:
        theirs = [named]
    else:
        others = [gpu for gpu in range(count) if gpu not in mine and gpu not in kept]
        pool = others if len(others) >= width else [*others, *mine]
        theirs = [tuple(pool[first : first + width]) for first in range(0, len(pool) - width + 1, width)] or [mine]
    return GpuAssignment(
        mine, tuple(theirs[number % len(theirs)] if servers_work else () for number in range(rollout.servers))
    )


def reward_gpus(config: RunSections) -> dict[int, str]:
    """GPUs that rewards name for models of their own, with their number, and the name of the component."""
    plugins = (part for part in config.reward.functions if part.function in installed("rewards"))
    named = ((_number(description("rewards", part.function).model(part)[1]), component_name(part)) for part in plugins)
    return {gpu: name for gpu, name in named if gpu is not None}


def _number(name: str) -> int | None:
    """The number in a device's name; None where it names none."""
    _, _, number = name.partition(":")
    return int(number) if number.isdecimal() else None


def check_assignment(config: RunSections, gpus: Sequence[str]) -> GpuAssignment:
    """Assign the GPUs. Raises UserError where two processes would work on one GPU at the same time, each as if it had
    all of it, and where the learner's ranks have too few."""
    assigned, ranks = assign_gpus(config, len(gpus)), config.learner.num_processes
    if 0 < len(assigned.learner) < ranks:
        raise UserError(
            f"learner.num_processes is {ranks}, and there are {len(assigned.learner)} GPU(s) for the learner "
            f"({describe_assignment(assigned, gpus)}): each rank needs one of its own. Set "
            f"learner.num_processes={len(assigned.learner)}, or learner.device=cpu"
        )
    in_use = {*assigned.learner, *(gpu for theirs in assigned.servers for gpu in theirs)}
    for gpu, name in reward_gpus(config).items():
        if gpu in in_use and not config.gpu_memory.budget_gib:
            raise UserError(
                f"the model of reward {name} is on GPU {gpu}, which the run works on, too "
                f"({describe_assignment(assigned, gpus)}), and gpu_memory.budget_gib is 0: the others would take all "
                "of its memory. Set gpu_memory.budget_gib to what that model leaves, or its device to another GPU"
                " or cpu"
            )
    together = assigned.is_shared_with_learner or assigned.servers_per_gpu > 1
    if not together or config.trainer.mode == "sync" or config.gpu_memory.budget_gib:
        return assigned
    rollout = config.rollout
    wide = f", each as wide as rollout.tensor_parallel_size={rollout.tensor_parallel_size}"
    servers = f"{rollout.servers} rollout server{'s' if rollout.servers > 1 else ''}"
    fixes = ["gpu_memory.budget_gib=N (GiB of one GPU, which they then divide)"]
    room = (len(gpus) - len(assigned.learner)) // rollout.tensor_parallel_size
    if rollout.device in ("auto", "cuda") and 0 < room < rollout.servers:
        fixes.insert(0, f"rollout.servers={room}")
    elif _number(rollout.device) is not None and len(gpus) > len(assigned.learner):
        fixes.insert(0, "rollout.device=cuda (each process then gets GPUs of its own)")
    if rollout.servers == rollout.tensor_parallel_size == 1:
        fixes.append("trainer.mode=sync learner.max_staleness=0 (they take turns)")
    fixes.append("the device of one side to cpu")
    raise UserError(
        f"the learner and {servers}{wide if rollout.tensor_parallel_size > 1 else ''} would share GPUs "
        f"({describe_assignment(assigned, gpus)}), and gpu_memory.budget_gib is 0: each would take memory as if it "
        f"were alone. Set {', or '.join(fixes)}"
    )


def describe_assignment(assigned: GpuAssignment, gpus: Sequence[str]) -> str:
    """`learner 0; rollout_server-1 1,2; rollout_server-2 3,4`"""
    parts = [f"learner {_names(assigned.learner, gpus)}"]
    for number, theirs in enumerate(assigned.servers, 1):
        name = "rollout_server" if len(assigned.servers) == 1 else f"rollout_server-{number}"
        parts.append(f"{name} {_names(theirs, gpus)}")
    return "; ".join(parts)


def _names(numbers: Sequence[int], gpus: Sequence[str]) -> str:
    return ",".join(gpus[number] for number in numbers) or "cpu"


def gpu_environment(name: str, numbers: Sequence[int], gpus: Sequence[str]) -> dict[str, str]:
    """Environment of a process whose setting names device `name`: it sees its own GPUs alone.

    A device that is named with its number keeps its meaning: a place among all GPUs.
    """
    if not gpus:
        return {}
    visible = {"CUDA_VISIBLE_DEVICES": _names(numbers, gpus)} if numbers and _number(name) is None else {}
    return {GPUS_VARIABLE: ",".join(gpus), **visible}


def listed_gpus(text: str) -> tuple[str, ...]:
    """GPUs in a value of CUDA_VISIBLE_DEVICES: numbers or UUIDs, up to the first that is none (CUDA's rule)."""
    found: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if not part or part.startswith("-"):
            break
        found.append(part)
    return tuple(found)
