"""Settings that would help a plan over its budget, largest effect first."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from asyncrl.config.parts import BASE_WEIGHTS, ROLLOUT_ENGINES
from asyncrl.config.rules import training_engine_problems, why_not_offloaded
from asyncrl.config.schema import changed
from asyncrl.devices.device import visible_gpus
from asyncrl.errors import UserError
from asyncrl.memory_plan import size
from asyncrl.memory_plan.lines import Change, memory_of
from asyncrl.memory_plan.plan import (
    MemoryPlan,
    device_sharing,
    longest_sequence,
    make_plan,
)
from asyncrl.model_files.folder import attention_heads

logger = logging.getLogger(__name__)

MOST_RANKS = 8
"""Ranks that are proposed where the GPUs of the machine are not known."""
_DIVIDING = ("learner.engine", "learner.num_processes")
_TRAINING_LESS = ("model.lora.rank", "model.quantization", "model.freeze_vision_tower")
"""Settings that train fewer weights, or beside rounded ones: combinations without them come first."""
_OF_THE_SAME_MODEL = ("rollout.", "trainer.", "reference.offload", "learner.num_processes")
"""Settings that change nothing of what was measured of the model."""


def advice(plan: MemoryPlan) -> list[str]:
    """List single changes by effect, and a combination that fits, if one does."""
    tried: list[tuple[Change, MemoryPlan]] = []
    for change in _levers(plan):
        with suppress(UserError):  # what the model does not allow, such as adapters where there is no linear layer
            tried.append((change, _make_other(plan, change)))
    useful = [(change, other) for change, other in tried if other.excess < plan.excess]
    useful.sort(key=lambda pair: (pair[1].excess, pair[1].peak))
    if not useful:
        return ["No setting changes that: use a smaller model or a larger device"]
    lines = ["What to change, largest first:"]
    for change, other in useful:
        left = size(other.excess) if other.excess else "0"
        lines.append(f"  {_text(change):<42} {size(plan.excess)} -> {left} too much")
    everything = [change for change, _ in useful]
    on_one_device = [change for change in everything if not any(key in change for key in _DIVIDING)]
    same_weights = [change for change in everything if not any(key in change for key in _TRAINING_LESS)]
    fitting = plan
    tried_together: list[list[Change]] = []
    for changes in ([c for c in on_one_device if c in same_weights], same_weights, on_one_device, everything):
        if not changes or changes in tried_together:
            continue
        tried_together.append(changes)
        together, fitting = _combine(plan, changes)
        if not fitting.excess:
            return [*lines, f"Together {_text(together)} fits: {size(fitting.peak)}"]
    return [*lines, f"All of them together need {size(fitting.peak)}: use a smaller model or a larger device"]


def _combine(plan: MemoryPlan, changes: Sequence[Change]) -> tuple[Change, MemoryPlan]:
    """Smallest number of changes, in order, that makes the plan fit; without those that earlier ones exclude."""
    together: dict[str, object] = {}
    for change in changes:
        other = changed(plan.config, change)
        if any(training_engine_problems(other)) or (other.learner.is_divided and other.model.quantization):
            continue
        together |= change
        plan = _make_other(plan, change)
        if not plan.excess:
            break
    return together, plan


def _make_other(plan: MemoryPlan, change: Change) -> MemoryPlan:
    """Make the plan after a change, of the same devices, measuring the model again only where it matters."""
    same = (*_OF_THE_SAME_MODEL, f"learner.{plan.config.learner.engine}.")
    same_model = all(key.startswith(same) for key in change)
    other = make_plan(changed(plan.config, change), plan.model if same_model else None)
    return replace(other, phases=other.phases[: len(plan.phases)]) if other.sharing == plan.sharing else other


def _levers(plan: MemoryPlan) -> Iterator[Change]:
    """Yield candidate setting changes, none of which changes the task."""
    config = plan.config
    batch, rollout = config.batch, config.rollout
    other_channel = {"rollout.weights_channel": "shm"} if rollout.uses_device_channel else {}
    if other_channel:
        yield other_channel
    yield from _divisions(plan)
    if device_sharing(config) == "together" and not config.learner.is_divided:
        yield {"trainer.mode": "sync", **other_channel}  # neither this nor the next goes with a device channel
    if not config.model.lora.rank:
        yield {"model.lora.rank": 16, **other_channel}
    elif not config.learner.is_divided and not config.model.quantization:
        yield from ({"model.quantization": name} for name in BASE_WEIGHTS.all())
    if config.model.dtype == "float32":
        yield {"model.dtype": "bfloat16"}
    if not config.model.freeze_vision_tower and not config.model.lora.rank:
        yield {"model.freeze_vision_tower": True}
    if not config.reference.offload and not config.learner.is_divided and not why_not_offloaded(config):
        yield {"reference.offload": True}
    if config.learner.is_divided:
        yield from memory_of(config.learner.engine).smaller(config)
    if not config.learner.cpu_offload:
        yield {"learner.cpu_offload": True}
    if not config.learner.gradient_checkpointing:
        yield {"learner.gradient_checkpointing": True}
    smaller = {
        "batch.tokens_per_microbatch": (batch.microbatch_tokens, longest_sequence(config.data)),
        "rollout.max_concurrent_sequences": (rollout.max_concurrent_sequences, config.trajectories_per_group),
    }
    for key, (value, least) in smaller.items():
        if max(least, value // 4) < value:
            yield {key: max(least, value // 4)}


def _divisions(plan: MemoryPlan) -> Iterator[Change]:
    """Yield more ranks, each on a device of its own: as few as fit by themselves."""
    config = plan.config
    learner = config.learner
    engine: dict[str, object] = {}
    if not learner.is_divided:
        engine = {"learner.engine": "fsdp2"}
        if config.rollout.uses_device_channel:
            engine["rollout.weights_channel"] = "shm"
        if config.reference.offload:
            engine["reference.offload"] = False
    if learner.device == "cpu" or config.model.quantization or any(training_engine_problems(changed(config, engine))):
        return
    own = {"learner.device": "cuda"} if ":" in learner.device else {}
    gpus = min(len(visible_gpus()) or MOST_RANKS, MOST_RANKS)
    counts = [ranks for ranks in (2, 4, 8) if learner.num_processes < ranks <= gpus]
    wide = "rollout.tensor_parallel_size"
    widens = (
        config.trainer.mode == "sync" and ROLLOUT_ENGINES[config.rollout.engine].spans_devices
    )  # on the devices of all ranks
    heads = attention_heads(config.model)
    divided, change = plan, {}
    for ranks in counts:
        change = {**engine, **own, "learner.num_processes": ranks, **({wide: math.gcd(ranks, heads)} if widens else {})}
        divided = _make_other(divided, change)
        if not divided.excess:
            break
    if counts:
        yield change


def _text(change: Change) -> str:
    return " ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in change.items()
    )
