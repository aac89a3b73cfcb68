"""`asyncrl doctor --plan`: the memory table of a configuration or of a model folder, as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.load import load_config
from asyncrl.config.parts import ROLLOUT_ENGINES
from asyncrl.config.schema import RunConfig, changed
from asyncrl.config.sections import ModelConfig
from asyncrl.config.service_sections import meant_dtype
from asyncrl.devices.device import gpu_bytes, resolve_dtype, visible_gpus
from asyncrl.devices.gpu_assignment import GPUS_VARIABLE
from asyncrl.errors import ExitCode
from asyncrl.memory_plan import GIB, size
from asyncrl.memory_plan.lines import count
from asyncrl.memory_plan.plan import MemoryPlan, Phase, make_plan
from asyncrl.memory_plan.token_choice import settle_layers, settle_tokens
from asyncrl.model_files.folder import is_hub_name, read_config, small_files
from asyncrl_plugins.doctor.advice import advice
from asyncrl_plugins.doctor.host_memory import host_items

_SHARING = {
    "turns": "one device, in turns (trainer.mode=sync)",
    "together": "one device, both at the same time",
    "apart": "two devices",
}
_SERVERS_BESIDE_RANKS = {
    "turns": "and a server on the same devices, in turns (trainer.mode=sync)",
    "together": "and servers on the ranks' devices at the same time",
    "apart": "and servers on other devices",
}


def print_memory_table(target: Path, overrides: Sequence[str]) -> int:
    """Print the table of a configuration, or of a model, a folder or one of the hub, with the default settings.

    Returns the exit code: 2 where the plan does not fit its budget."""
    config = _planned_config(target, overrides)
    devices = (config.learner.device, config.rollout.device)
    sees_gpus = bool(visible_gpus()) or any(name.startswith("cuda") for name in devices)
    dtype = meant_dtype(config.model.dtype, devices, cuda=True) if sees_gpus else resolve_dtype(config).model.dtype
    notes = []
    if config.model.dtype == "auto" and not sees_gpus and "cpu" not in devices:
        notes = [
            f"model.dtype=auto is {dtype} on this machine, which has no GPU. For a run on one: model.dtype=bfloat16"
        ]
    config, chosen = settle_tokens(changed(config, {"model.dtype": dtype}), gpu_bytes(config.learner.device))
    config, layers = settle_layers(config, config.learner.num_processes)
    plan = make_plan(config)
    print("\n".join([describe(plan), *notes, *filter(None, (chosen, layers))]))
    return ExitCode.USER_ERROR if plan.excess else ExitCode.FINISHED


def _planned_config(target: Path, overrides: Sequence[str]) -> RunConfig:
    if not target.is_dir() and (target.suffix in (".yaml", ".yml") or target.exists() or not is_hub_name(str(target))):
        return load_config(target, overrides)
    folder = small_files(ModelConfig(path=str(target)))
    read_config(ModelConfig(path=str(folder)))  # refuses what is no model folder
    defaults = (
        f"model.path={folder}",
        "run_dir=plan",
        "data.train_files=[plan]",
        "reward.functions=[{function: exact_match}]",
    )
    return load_config(None, [*defaults, *overrides])


def describe(plan: MemoryPlan) -> str:
    """The memory table, and whether it fits."""
    config = plan.config
    adapted = f", LoRA of rank {config.model.lora.rank}" if config.model.lora.rank else ""
    text = [
        f"{config.model.path}: {count(plan.model.parameters)} parameters in {config.model.dtype}{adapted}"
        f"; engine {config.rollout.engine}; {_devices(plan)}"
    ]
    unit, divisor = ("GiB", GIB) if plan.peak >= GIB else ("MiB", 2**20)
    for part in (*plan.phases, Phase("host memory", tuple(host_items(plan)))):
        text += ["", f"  {part.name.upper():<36}{unit:>9}"]
        text += [f"  {line.name:<36}{line.nbytes / divisor:>9.2f}  {line.why}" for line in part.lines]
        if part in plan.phases:
            text.append(f"  {'= at most':<36}{part.nbytes / divisor:>9.2f}")
    return "\n".join([*map(str.rstrip, text), "", *_verdict(plan), *_placement(plan)])


def _devices(plan: MemoryPlan) -> str:
    ranks = plan.config.learner.num_processes
    if ranks == 1:
        return _SHARING[plan.sharing]
    return f"{ranks} ranks of {plan.config.learner.engine}, {_SERVERS_BESIDE_RANKS[plan.sharing]}"


def _placement(plan: MemoryPlan) -> list[str]:
    """Placement of planned servers without visible GPUs, and the way to plan the other placement."""
    learner, rollout = plan.config.learner, plan.config.rollout
    if learner.device in ("auto", "cuda") and 0 < len(visible_gpus()) < learner.num_processes:
        return [f"NOTE: {learner.num_processes} ranks need a GPU each, and {len(visible_gpus())} are planned for"]
    is_open = {learner.device, rollout.device} <= {"auto", "cuda"} and ROLLOUT_ENGINES[rollout.engine].has_model
    if not is_open or plan.sharing != "together" or visible_gpus():
        return []
    enough = learner.num_processes + rollout.servers * rollout.tensor_parallel_size
    gpus = ",".join(map(str, range(enough)))
    return [
        "No GPU is seen here: servers are planned on the learner's. `asyncrl train` gives them GPUs of their own where "
        f"there are enough; {GPUS_VARIABLE}={gpus} before this command plans for {enough} GPUs"
    ]


def _verdict(plan: MemoryPlan) -> list[str]:
    budget = f"gpu_memory.budget_gib={plan.config.gpu_memory.budget_gib:g}"
    if not plan.budget:
        fits = f"Fits a device of {size(plan.peak)} and more"
        return [f"{fits}. Set gpu_memory.budget_gib to have a run refused that does not"]
    if plan.excess:
        return [f"DOES NOT FIT {budget}", *advice(plan)]
    return [f"Fits {budget}, with {size(plan.budget - plan.peak)} left"]
