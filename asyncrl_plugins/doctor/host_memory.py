"""Host memory of a run: published weights, pixels of prompts, and what sleeps or is offloaded there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from asyncrl.config.parts import ROLLOUT_ENGINES, WEIGHT_CHANNELS
from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import ModelConfig
from asyncrl.memory_plan.lines import (
    GRADIENTS,
    MemoryItem,
    memory_of,
    memory_of_engine,
    offloads_parts,
    part_lines,
    servers_text,
)
from asyncrl.memory_plan.live_bytes import nbytes
from asyncrl.memory_plan.plan import MemoryPlan
from asyncrl.memory_plan.rehearsal import META, ModelBytes, image_features
from asyncrl.model_files.folder import model_folder, open_weights, weight_files
from asyncrl.models.loading import has_vision, skeleton, torch_dtype

PIXELS = "pixels of prompts"
"""Name of a line of host memory that is reached where all prompts are images."""
_IN_FILES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Names of dtypes in safetensors."""


def _pulled_line(config: RunConfig, model: ModelBytes) -> MemoryItem:
    """Memory of servers for versions that come over ZeroMQ."""
    channel, servers = config.rollout.weights_channel, config.rollout.servers
    versions = WEIGHT_CHANNELS[channel].host_versions
    before = f", and the one before (rollout.weights_channel={channel})" if versions > 1 else ""
    why = f"a version that arrives{before}{servers_text(servers)}"
    return MemoryItem("weights over ZeroMQ", servers * versions * model.published, why)


def prompt_pixels(config: RunConfig) -> int:
    """Bytes of the fp32 pixels of a prompt of the greatest length that is all images; 0 without a vision tower."""
    model, image_tokens = skeleton(config.model), config.data.max_prompt_length
    if not has_vision(model.config):
        return 0
    vision = model.config.vision_config
    if hasattr(vision, "temporal_patch_size"):
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return 4 * image_tokens * vision.spatial_merge_size**2 * width
    height, width = vision.image_size if not isinstance(vision.image_size, int) else [vision.image_size] * 2
    with torch.no_grad():
        tokens_per_image = len(image_features(model, 1, META))
    return 4 * -(-image_tokens // tokens_per_image) * vision.num_channels * height * width


def _loading(config: ModelConfig) -> int:
    """Bytes that a process of several ranks has of its own while it loads the weights, before it keeps its part."""
    model = skeleton(config)
    return 0 if can_stay_mapped(config, model) else nbytes([*model.parameters(), *model.buffers()])


def can_stay_mapped(config: ModelConfig, model: Any) -> bool:
    """Whether its files have the parameters as the model, a skeleton, has them: in `config.dtype`, in safetensors, and
    none that are put together, as transformers does with experts."""
    found: list[str] = []
    for file in weight_files(model_folder(config)):
        if file.suffix != ".safetensors":
            return False
        with open_weights(file) as opened:
            found += [opened.get_slice(name).get_dtype() for name in opened.keys()]  # noqa: SIM118
    return set(found) == {_IN_FILES[torch_dtype(config)]} and len(found) <= len(model.state_dict())


def host_items(plan: MemoryPlan) -> list[MemoryItem]:
    """Items of host memory, of all processes of a run as if they were on one machine."""
    return list(_items(plan))


def _items(plan: MemoryPlan) -> Iterator[MemoryItem]:
    config, model = plan.config, plan.model
    beside = config.evaluates_beside_training
    why = f"the newest two versions, {'one that is evaluated, ' if beside else ''}and one that a server may still load"
    yield MemoryItem("published weights, in /dev/shm", plan.publications, why)
    channel = config.rollout.weights_channel
    if channel == "zmq" or WEIGHT_CHANNELS[channel].puller:  # with auto the servers here map the file
        yield _pulled_line(config, model)
    pixels = prompt_pixels(config) if ROLLOUT_ENGINES[config.rollout.engine].has_model else 0
    if pixels:  # made by a server when a ticket comes
        prompts, servers = config.groups_in_flight * (2 if beside else 1), config.rollout.servers
        yield MemoryItem(
            PIXELS,
            servers * prompts * pixels,
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
        asleep = sum(engine.held if offloads else engine.kept for engine in engines) + model.reference - offloaded
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
    loaded = (config.model, config.critic_model if model.critic else None, config.reference_model)
    if loading := ranks * max(_loading(each) for each in loaded if each is not None):
        why = f"for a while, as each of {ranks} ranks loads one whose files have another dtype or layout"
        yield MemoryItem("whole models", loading, why)
