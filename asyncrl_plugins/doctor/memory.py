"""The model folder's small files, and the memory plan against what devices, host and /dev/shm have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil

from asyncrl.checks.inputs import (
    check_devices,
    check_engine,
    check_lengths,
    check_model,
    check_publishing,
    gpus_of_run,
)
from asyncrl.config.schema import RunConfig, changed
from asyncrl.config.service_sections import meant_device
from asyncrl.devices.device import resolve_dtype
from asyncrl.devices.gpu_assignment import assign_gpus, describe_assignment
from asyncrl.errors import UserError
from asyncrl.memory_plan import GIB, size
from asyncrl.memory_plan.lines import WORKING
from asyncrl.memory_plan.plan import MemoryPlan, Phase, check_shared_memory, make_plan
from asyncrl.memory_plan.rehearsal import NoPlanError
from asyncrl.memory_plan.token_choice import settle_layers, settle_tokens
from asyncrl.model_files.folder import check_weights
from asyncrl.models.generation_settings import generation_config
from asyncrl.models.loading import skeleton
from asyncrl.models.lora import add_adapter, describe_adapter, resolve_adapter
from asyncrl_plugins.doctor.advice import advice
from asyncrl_plugins.doctor.findings import Finding, Findings, problem, split_fix
from asyncrl_plugins.doctor.host_memory import PIXELS, host_items
from asyncrl_plugins.doctor.machine import Device, memory_limit


def find_model(config: RunConfig) -> Findings[dict[str, Any]]:
    """Checks the folder, and whether devices and engine here can do what is wanted. Returns its config.json."""
    described = check_model(config.model)
    check_lengths(config, described)
    check_weights(config.model)
    generation_config(config.model)
    check_devices(config, ("learner", "rollout_server"))
    check_engine(config)
    kind = described.get("model_type", "of no stated type")
    yield Finding("model", f"{config.model.path}: {kind}, engine {config.rollout.engine}, mode {config.trainer.mode}")
    yield from _family(config)
    if quantization := config.rollout.quantization:
        held = "held in 8 bits; vLLM has run so on a CPU, and is unproven on a GPU"
        if config.rollout.engine == "hf":
            held = f"rounded and held in {resolve_dtype(config).model.dtype}, so that no memory is saved"
        yield Finding("rollout weights", f"{quantization}, made anew from each version, {held}", "note")
    if quantization := config.model.quantization:
        sampled = "the same values" if config.rollout.precision(quantization) == quantization else "others"
        held = f"{quantization} in the learner, below adapters; completions are sampled with {sampled}, in model.dtype"
        yield Finding("base weights", held, "note")
    if gpus := gpus_of_run(config.learner.device, config.rollout.device):
        yield Finding("GPUs", describe_assignment(assign_gpus(config, len(gpus)), gpus))
    return described


def _family(config: RunConfig) -> Findings[None]:
    """Compare what learner and hf engine make of the model's family with its own plain pass, in small."""
    from learner.training.packing_check import packing_obstacle

    for setting, model in (("model", config.model), *config.other_models):
        if obstacle := packing_obstacle(model):
            value = f"{setting}: groups cannot be packed ({obstacle})"
            yield Finding("packing", value, "warning", "none is needed: each row is computed alone, which takes longer")
    if config.rollout.engine == "hf":
        from rollout_server.engines.hf.decode_check import check_decoding

        check_decoding(config.model)
    if adapter := resolve_adapter(config.model):
        with_adapter = skeleton(config.model.model_copy(update={"dtype": "float32"}))
        add_adapter(with_adapter, adapter)
        yield Finding("adapter", describe_adapter(with_adapter))


def find_memory(config: RunConfig, devices: Sequence[Device]) -> Findings[MemoryPlan | None]:
    """Compares the plan with the devices that the configuration means on this machine."""
    meant = {
        f"{side}.device": meant_device(getattr(config, side).device, cuda=bool(devices))
        for side in ("learner", "rollout")
    }
    assigned = assign_gpus(config, len(devices))
    config = changed(config, {key: name for key, name in meant.items() if name == "cpu"})
    totals = [devices[number].total for number in assigned.learner if number < len(devices)]
    config, chosen = settle_tokens(config, min(totals, default=0))
    if chosen:
        yield Finding("micro-batches", chosen, "note")
    try:
        config, layers = settle_layers(config, config.learner.num_processes)
        plan = make_plan(config)
    except NoPlanError as unknown:
        text, fix = split_fix(str(unknown))
        yield Finding("memory plan", text, "warning", fix)
        return None
    if layers:
        yield Finding("checkpointed layers", layers, "note")
    on_host: list[int] = []
    for place, phase in enumerate(plan.phases):
        is_servers = phase.name.startswith("engine")
        name = meant["rollout.device" if is_servers else "learner.device"]
        numbers = assigned.servers[0][:1] if is_servers else assigned.learner
        if not numbers and name.startswith("cuda"):
            numbers = (int(name.partition(":")[2] or 0),)
        if not numbers or max(numbers) >= len(devices):
            on_host.append(place)
            continue
        for number in numbers:
            yield _on_gpu(plan, phase, devices[number], number)
    asleep, pixels = _host_bytes(plan)
    needed = asleep + _beside_gpus(plan, on_host)
    passes = _beside_gpus(plan, on_host) - _beside_gpus(_at_rest(plan), on_host)
    available = psutil.virtual_memory().available
    free = min(available, memory_limit() or available)
    value = f"a run needs {size(needed)} beside its processes' own, {size(free)} are available"
    if needed - pixels - passes > free:
        if ranks := _fewer_ranks(plan, on_host, free):
            fix = f"fewer ranks: learner.num_processes={ranks} fits"
            yield Finding("host memory", value, "problem", fix)
        else:
            yield _too_large(plan, "host memory", value, free - asleep)
    elif needed > free:
        value += (
            f". {size(pixels)} of it are pixels, if all prompts of data.max_prompt_length were images, and "
            f"{size(passes)} are passes over samples of the greatest length, which few are"
        )
        fix = "lower batch.tokens_per_microbatch, data.max_prompt_length or batch.prompts_per_step if most of yours are"
        yield Finding("host memory", value, "warning", fix)
    else:
        yield Finding("host memory", value)
    yield _budget(plan)
    try:
        check_publishing()
        yield Finding("room to publish", check_shared_memory(plan))
    except UserError as error:
        yield problem("room to publish", error)
    return plan


def _at_rest(plan: MemoryPlan) -> MemoryPlan:
    """The plan without what passes take, which is an upper bound."""
    phases = (
        replace(phase, lines=tuple(line for line in phase.lines if line.name != WORKING)) for phase in plan.phases
    )
    return replace(plan, phases=tuple(phases))


def _host_bytes(plan: MemoryPlan) -> tuple[int, int]:
    """Bytes of host memory, without phases that have no GPU, and the part of them that is pixels of prompts."""
    items = host_items(plan)
    return sum(item.nbytes for item in items), sum(item.nbytes for item in items if item.name == PIXELS)


def _beside_gpus(plan: MemoryPlan, on_host: Sequence[int]) -> int:
    """Bytes of host memory of the phases at these places of the plan, which have no GPU."""
    phases = [plan.phases[place] for place in on_host]
    ranks = plan.config.learner.num_processes
    needs = [phase.nbytes * (1 if phase.name.startswith("engine") else ranks) for phase in phases]
    return sum(needs) if plan.sharing == "apart" else max(needs, default=0)


def _fewer_ranks(plan: MemoryPlan, on_host: Sequence[int], free: int) -> int:
    """The most ranks, halved until host memory has room for them without pixels; 0 where one has not, either."""
    ranks = plan.config.learner.num_processes // 2
    while ranks:
        fewer = make_plan(changed(plan.config, {"learner.num_processes": ranks}), plan.model)
        asleep, pixels = _host_bytes(fewer)
        if asleep - pixels + _beside_gpus(fewer, on_host) <= free:
            break
        ranks //= 2
    return ranks


def _on_gpu(plan: MemoryPlan, phase: Phase, device: Device, number: int) -> Finding:
    what, value = f"memory cuda:{number}", f"{phase.name}: {size(phase.nbytes)} of {size(device.total)}"
    if phase.nbytes > device.total:
        return _too_large(plan, what, value, device.total)
    if phase.nbytes > device.free:
        value += f", of which {size(device.free)} are free now"
        return Finding(what, value, "warning", "end what holds the rest: nvidia-smi lists the processes")
    return Finding(what, value)


def _too_large(plan: MemoryPlan, what: str, value: str, room: int) -> Finding:
    """A problem, with the settings that would bring the plan under `room`, if any would."""
    *lines, last = advice(replace(plan, config=changed(plan.config, {"gpu_memory.budget_gib": max(room, 1) / GIB})))
    fix = last if last.startswith("Together") else "no setting makes it fit: use a smaller model, or a larger device"
    return Finding(what, value, "problem", fix, tuple(lines))


def _budget(plan: MemoryPlan) -> Finding:
    budget = f"gpu_memory.budget_gib={plan.config.gpu_memory.budget_gib:g}"
    if not plan.budget:
        return Finding("memory budget", f"none ({budget}); the table: asyncrl doctor --plan", "note")
    if plan.excess:
        return _too_large(plan, "memory budget", f"{budget}, and the run needs {size(plan.peak)}", plan.budget)
    return Finding("memory budget", f"{size(plan.peak)} of {budget}")
