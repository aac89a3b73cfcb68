"""Host memory of a run: published weights, pixels of prompts, and what sleeps or is offloaded there."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.parts import ROLLOUT_ENGINES, WEIGHT_CHANNELS
from asyncrl.config.schema import RunConfig
from asyncrl.memory_plan.engine_memory import memory_of_engine
from asyncrl.memory_plan.items import MemoryItem, servers_text
from asyncrl.memory_plan.plan import MemoryPlan, published_versions
from asyncrl.memory_plan.rank_lines import GRADIENTS, memory_of, offloads_parts, part_lines
from asyncrl.memory_plan.rehearsal import ModelBytes

PIXELS = "pixels of prompts"
"""Name of a line of host memory that is reached where all prompts are images."""


def _pulled_line(config: RunConfig, model: ModelBytes) -> MemoryItem:
    """Memory of servers for versions that come over ZeroMQ."""
    channel, servers = config.rollout.weights_channel, config.rollout.servers
    versions = WEIGHT_CHANNELS[channel].host_versions
    before = f", and the one before (rollout.weights_channel={channel})" if versions > 1 else ""
    why = f"a version that arrives{before}{servers_text(servers)}"
    return MemoryItem("weights over ZeroMQ", servers * versions * model.published, why)


def host_items(plan: MemoryPlan) -> list[MemoryItem]:
    """Items of host memory, of all processes of a run as if they were on one machine."""
    return list(_items(plan.config, plan.model))


def _items(config: RunConfig, model: ModelBytes) -> Iterator[MemoryItem]:
    beside = config.evaluates_beside_training
    why = f"the newest two versions, {'one that is evaluated, ' if beside else ''}and one that a server may still load"
    yield MemoryItem("published weights, in /dev/shm", published_versions(beside) * model.published, why)
    channel = config.rollout.weights_channel
    if channel == "zmq" or WEIGHT_CHANNELS[channel].puller:  # with auto the servers here map the file
        yield _pulled_line(config, model)
    if model.pixels and ROLLOUT_ENGINES[config.rollout.engine].has_model:  # made by a server when a ticket comes
        prompts, servers = config.groups_in_flight * (2 if beside else 1), config.rollout.servers
        yield MemoryItem(
            PIXELS,
            servers * prompts * model.pixels,
            f"at most: {prompts} prompts all of images, of tickets that a server may hold"
            f"{', half of them held-out rows' if beside else ''}{servers_text(servers)}",
        )
    if config.learner.is_divided:
        yield from _lines_of_ranks(config, model)
    if config.trainer.save_async:
        trained = (model.published if config.model.lora.rank else model.weights) + model.masters + model.moments
        saved = trained + (model.critic.kept if model.critic else 0) + model.reference * config.reference.moves
        why = "weights and optimiser state, until they are written (trainer.save_async)"
        yield MemoryItem("copy for a checkpoint", saved, why)
    offloaded = model.reference if config.reference.offload else 0
    if offloaded:
        yield MemoryItem("reference policy, offloaded", offloaded, "weights, pinned (reference.offload)")
    engines = (model, model.critic) if model.critic else (model,)
    offloads = config.learner.offloads_masters
    if offloads:
        why = "master weights, gradients and AdamW's moments (learner.cpu_offload)"
        yield MemoryItem("optimiser state, offloaded", sum(engine.offloaded for engine in engines), why)
    if config.trainer.mode == "sync" and not config.learner.is_divided:
        asleep = sum(engine.weights if offloads else engine.kept for engine in engines) + model.reference - offloaded
        yield MemoryItem("learner asleep", asleep, f"weights{'' if offloads else ' and optimiser state'}, pinned")
    if config.trainer.mode == "sync" and ROLLOUT_ENGINES[config.rollout.engine].has_model:
        if config.rollout.sleep_level == 1:
            yield MemoryItem("engine asleep", model.weights, "weights, pinned")
        else:  # it forgets what is published to it again; the base of an adapter never is
            why = "the weights that are not published, pinned" if config.model.lora.rank else "forgotten"
            kept = max(0, model.weights - model.published)
            yield MemoryItem("engine asleep", kept, f"{why} (rollout.sleep_level=2)")
        yield from memory_of_engine(config.rollout.engine).asleep_on_host(config)


def _lines_of_ranks(config: RunConfig, model: ModelBytes) -> Iterator[MemoryItem]:
    """Host memory of all ranks, as if they were on one machine."""
    ranks = config.learner.num_processes
    if offloads_parts(config.learner):
        kept = ranks * memory_of(config.learner.engine).offloaded(model, config)
        yield MemoryItem("parts, offloaded", kept, "of all ranks, pinned (learner.cpu_offload)")
    elif config.trainer.mode == "sync":
        parts = (line.nbytes for line in part_lines(model, config.model.dtype, ranks) if line.name != GRADIENTS)
        yield MemoryItem("learner asleep", ranks * sum(parts), "weights and optimiser state of all ranks, pinned")
    engines = (model, model.critic) if model.critic else (model,)
    if loading := ranks * max(*(engine.loading for engine in engines), model.loading_reference):
        why = f"for a while, as each of {ranks} ranks loads one whose files have another dtype or layout"
        yield MemoryItem("whole models", loading, why)
