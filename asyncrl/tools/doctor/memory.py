"""What the memory plan asks for, against what the devices, the host and /dev/shm have."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace

from asyncrl.config.device_rules import meant_device
from asyncrl.config.schema import RunConfig
from asyncrl.tools.doctor.devices import Device
from asyncrl.tools.doctor.findings import Finding, Findings, size
from asyncrl.tools.doctor.machine import shared_memory_fix, usable_memory
from asyncrl.tools.memory_plan.advice import advice
from asyncrl.tools.memory_plan.plan import GIB, MemoryPlan, Phase, changed, make_plan
from protocol.endpoints import SHARED_MEMORY


def find_memory(config: RunConfig, devices: Sequence[Device]) -> Findings[MemoryPlan]:
    """The plan, of the devices that the configuration means on this machine."""
    meant = {
        f"{side}.device": meant_device(getattr(config, side).device, cuda=bool(devices))
        for side in ("learner", "rollout")
    }
    plan = make_plan(changed(config, meant))
    on_host: list[Phase] = []
    for phase in plan.phases:
        index = _device_index(phase, meant)
        if index is None or index >= len(devices):
            on_host.append(phase)
        else:
            yield _on_device(plan, phase, index, devices[index])
    yield _on_host(plan, on_host)
    yield _budget(plan)
    yield _shared_memory(plan)
    return plan


def _device_index(phase: Phase, meant: dict[str, str]) -> int | None:
    """Of the CUDA device that holds this phase; None for the CPU."""
    name = meant["rollout.device" if phase.name.startswith("engine") else "learner.device"]
    return int(name.partition(":")[2] or 0) if name.startswith("cuda") else None


def _on_device(plan: MemoryPlan, phase: Phase, index: int, device: Device) -> Finding:
    what, value = f"memory cuda:{index}", f"{phase.name}: {size(phase.nbytes)} of {size(device.total)}"
    if phase.nbytes > device.total:
        return _too_large(plan, what, value, device.total)
    if phase.nbytes > device.free:
        value += f", of which {size(device.free)} are free now"
        return Finding(what, value, "warning", "end what holds the rest: nvidia-smi lists the processes")
    return Finding(what, value)


def _on_host(plan: MemoryPlan, phases: Sequence[Phase]) -> Finding:
    """What is not on a GPU is here, next to what sleeps here and what is published."""
    resident = sum(line.nbytes for line in plan.host)
    working = max((phase.nbytes for phase in phases), default=0)
    if plan.sharing == "apart":
        working = sum(phase.nbytes for phase in phases)
    free = usable_memory()
    value = f"a run needs {size(working + resident)} beside its processes' own, {size(free)} are available"
    if working + resident > free:
        return _too_large(plan, "host memory", value, free - resident)
    return Finding("host memory", value)


def _too_large(plan: MemoryPlan, what: str, value: str, room: int) -> Finding:
    """With the settings that would bring it under `room`, if any would."""
    *lines, last = advice(replace(plan, config=changed(plan.config, {"gpu_memory.budget_gib": max(room, 1) / GIB})))
    fix = last if last.startswith("Together") else "no setting makes it fit: use a smaller model, or a larger device"
    return Finding(what, value, "problem", fix, tuple(lines))


def _budget(plan: MemoryPlan) -> Finding:
    budget = plan.config.gpu_memory.budget_gib
    if not budget:
        return Finding("memory budget", "none (gpu_memory.budget_gib=0); the table: asyncrl doctor --plan", "note")
    if plan.excess:
        return _too_large(
            plan, "memory budget", f"gpu_memory.budget_gib={budget:g}, and the run needs {size(plan.peak)}", plan.budget
        )
    return Finding("memory budget", f"{size(plan.peak)} of gpu_memory.budget_gib={budget:g}")


def _shared_memory(plan: MemoryPlan) -> Finding:
    if not SHARED_MEMORY.is_dir():
        return Finding("room to publish", f"no {SHARED_MEMORY}: three versions of the weights go to a disk", "note")
    free = shutil.disk_usage(SHARED_MEMORY).free
    value = f"three versions of the weights are {size(plan.publications)}, {SHARED_MEMORY} has {size(free)} free"
    if plan.publications <= free:
        return Finding("room to publish", value)
    return Finding("room to publish", value, "problem", shared_memory_fix(f"{-(-plan.publications // GIB) + 1}g"))
