"""The memory plan: memory of each device while learner or engine works."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from asyncrl.config.device_rules import same_device
from asyncrl.config.engine_rules import CACHE_BLOCK, PREFILL_TOKENS, cache_columns
from asyncrl.config.gpu_assignment import assign_gpus
from asyncrl.config.rollout_engines import rollout_engine
from asyncrl.config.schema import RunConfig
from asyncrl.config.weight_channels import weight_channel
from asyncrl.devices.device import resolve_dtype, visible_gpus
from asyncrl.errors import UserError
from asyncrl.memory_plan.items import STEPPING, WORKING, MemoryItem, Phase, allocator, count
from asyncrl.memory_plan.rank_lines import nccl_of_ranks, rank_lines
from asyncrl.memory_plan.rehearsal import ModelBytes, rehearse
from asyncrl.telemetry.numbers import GIB

CONTEXT_BYTES = 5 * GIB // 8
"""CUDA's context and the libraries' workspaces of a process that has used the device: 619 MiB on an H100 (CUDA 13)."""
GRAPHS_BYTES, GRAPHS_LEFT_BYTES = 2 * GIB, GIB // 2
"""vLLM's CUDA graphs (1 to 3 GiB), and what CUDA itself keeps of them when vLLM takes them to the host. Estimates."""
OFFLOADS_GRAPHS = "sleep_mode_offload_cudagraph"
"""Argument of vLLM, on in sync mode unless rollout.engine_args say otherwise: graphs sleep in host memory, too."""
SENT_VERSIONS = 2
"""Versions in the learner's device memory, over a device channel: the newest, and one that is still being sent."""
PUBLISHED_VERSIONS = 3
"""Versions in shared memory (protocol/weights.py): the newest two, and one that a slow server may have mapped. One
that is evaluated beside training comes to them."""
SAMPLING_BYTES, TRUNCATION_BYTES = 28, 60
"""Per logit while tokens are drawn (fp32 log-probs, fp64 cumulative distribution), and with top-k, top-p or min-p."""

Sharing = Literal["turns", "together", "apart"]
"""How learner and engine share a device: one after the other (sync mode), at the same time, or not at all."""


@dataclass(frozen=True)
class MemoryPlan:
    config: RunConfig
    model: ModelBytes
    sharing: Sharing
    phases: tuple[Phase, ...]
    """Each is of one device, and must fit the budget."""

    @property
    def budget(self) -> int:
        """Bytes; 0 where there is none."""
        return int(self.config.gpu_memory.budget_gib * GIB)

    @property
    def peak(self) -> int:
        return max(phase.nbytes for phase in self.phases)

    @property
    def excess(self) -> int:
        """Bytes over the budget, of all phases together; 0 without one."""
        return sum(max(0, phase.nbytes - self.budget) for phase in self.phases) if self.budget else 0

    @property
    def publications(self) -> int:
        """Bytes of published versions in shared memory."""
        return published_versions(self.config) * self.model.published


def make_plan(config: RunConfig, model: ModelBytes | None = None) -> MemoryPlan:
    """Make the plan, with model.dtype as it is meant on this machine, reusing `model` if it was measured.

    Raises UserError for what is no model.
    """
    config = resolve_dtype(config)
    model = model or rehearse(config)
    sharing = device_sharing(config)
    each = f", each of {config.learner.num_processes} ranks" if config.learner.num_processes > 1 else ""
    learning = Phase(f"learner awake{each}", tuple(_learner_lines(model, config)))
    phases = [learning]
    if rollout_engine(config.rollout.engine).has_model:
        sampling = Phase("engine awake", (*_engine_lines(model, config), *_arriving_lines(model, config)))
        everything = (*learning.lines, *sampling.lines)
        contexts = [*(line for line in everything if line.name.startswith("context")), *nccl_of_ranks(config)]
        if sharing == "together":
            phases = [Phase("learner and engine at the same time", learning.lines + sampling.lines)]
        elif sharing == "apart":
            phases = [learning, sampling]
        else:  # a process that sleeps leaves its context, and vLLM some of its graphs
            asleep = _graphs_left(config)
            phases = [
                Phase(name, (*lines, *(line for line in contexts if line not in lines), *left))
                for name, lines, left in ((learning.name, learning.lines, asleep), (sampling.name, sampling.lines, []))
            ]
    return MemoryPlan(config, model, sharing, tuple(phases))


def device_sharing(config: RunConfig) -> Sharing:
    if config.trainer.mode == "sync":
        return "turns"
    assigned = assign_gpus(config, len(visible_gpus()))
    if assigned.learner and assigned.servers_per_gpu:
        return "together" if assigned.is_shared_with_learner else "apart"
    return "together" if same_device(config, cuda=torch.cuda.is_available()) else "apart"


def servers_per_gpu(config: RunConfig) -> int:
    """Most servers on one GPU of this machine; all of them where it has none."""
    gpus = visible_gpus()
    return (assign_gpus(config, len(gpus)).servers_per_gpu if gpus else 0) or config.rollout.servers


def _context(device: str, process: str, copies: int = 1) -> list[MemoryItem]:
    """Context memory of a process; `auto` counts as a GPU, even where there is none."""
    return [] if device == "cpu" else [MemoryItem(f"context of the {process}", copies * CONTEXT_BYTES, "an estimate")]


def _graphs(config: RunConfig, copies: int = 1) -> list[MemoryItem]:
    """CUDA graphs of vLLM: it captures its decode steps unless it runs eagerly."""
    rollout = config.rollout
    if rollout.engine != "vllm" or rollout.device == "cpu" or rollout.engine_args.get("enforce_eager"):
        return []
    return [
        MemoryItem("CUDA graphs", copies * GRAPHS_BYTES, "an estimate; none with enforce_eager in rollout.engine_args")
    ]


def offloads_graphs(config: RunConfig) -> bool:
    return bool(_graphs(config)) and config.rollout.engine_args.get(OFFLOADS_GRAPHS, True)


def _graphs_left(config: RunConfig) -> list[MemoryItem]:
    """CUDA graphs that stay on the device while vLLM sleeps."""
    what = "CUDA graphs of the sleeping engine"
    if offloads_graphs(config):
        return [MemoryItem(what, GRAPHS_LEFT_BYTES, "an estimate of what CUDA keeps; the rest is in host memory")]
    return [
        MemoryItem(what, line.nbytes, f"an estimate; they stay without {OFFLOADS_GRAPHS}") for line in _graphs(config)
    ]


def _learner_lines(model: ModelBytes, config: RunConfig) -> Iterator[MemoryItem]:
    what = f"forward and backward of {config.batch.microbatch_tokens} tokens (batch.tokens_per_microbatch)"
    if config.learner.is_divided:
        yield from rank_lines(model, config, what)
    else:
        yield from _whole_lines(model, config, what)
    yield from _context(config.learner.device, "learner")
    channel = config.rollout.weights_channel
    if config.rollout.uses_device_channel:  # docs/decisions/013
        why = f"rollout.weights_channel={channel}: the newest version, and one that is still being sent"
        yield MemoryItem("weights that are sent", SENT_VERSIONS * model.published, why)
        yield from _channel_lines(config, "learner", config.rollout.servers)


def _whole_lines(model: ModelBytes, config: RunConfig, what: str) -> Iterator[MemoryItem]:
    engines = (model, model.critic) if model.critic else (model,)  # one at a time is at work
    passing = max(engine.passing for engine in engines)
    offloads = config.learner.offloads_masters
    working = max(passing, 0 if offloads else max(engine.stepping for engine in engines))
    yield MemoryItem("weights", model.weights, f"{count(model.parameters)} in {config.model.dtype}")
    if not offloads:
        yield MemoryItem("gradients", model.gradients, f"{count(model.trained)} are trained, gradients in float32")
        in_8_bits = ", of 8 bits where a tensor is not small" if config.learner.optimizer == "adamw_8bit" else ""
        if model.masters:
            yield MemoryItem(
                "master weights", model.masters, f"float32 copies of what is trained in {config.model.dtype}"
            )
        yield MemoryItem("AdamW moments", model.moments, f"two averages of each{in_8_bits}")
    if critic := model.critic:
        held = critic.weights if offloads else critic.kept + critic.gradients
        yield MemoryItem("critic", held, f"{count(critic.parameters)}{'' if offloads else ' with optimiser state'}")
    if model.reference:
        why = "weights and their moving averages" if config.reference.ema else "weights"
        why += "; none with adapters and without reference.path"
        held = model.reference
        if config.reference.offload:  # no gradient is there before the first micro-batch and after the update
            held = max(0, held - (0 if offloads else model.gradients))
            why = "what it needs, while it scores, beyond the place of the gradients (reference.offload)"
        yield MemoryItem("reference policy", held, why)
    yield MemoryItem(WORKING, working, STEPPING if working > passing else what)
    yield allocator(working)


def _arriving_lines(model: ModelBytes, config: RunConfig) -> Iterator[MemoryItem]:
    """Memory of incoming weights: a device channel needs one full version per worker, whatever part it has."""
    channel = config.rollout.weights_channel
    if config.rollout.uses_device_channel:
        copies = servers_per_gpu(config)
        why = f"rollout.weights_channel={channel}: a whole version, beside the model" + servers_text(copies)
        yield MemoryItem("weights that arrive", copies * model.published, why)
        yield from _channel_lines(config, "rollout server", copies)


def _channel_lines(config: RunConfig, process: str, servers: int) -> list[MemoryItem]:
    """Memory that the channel takes for itself, for each server."""
    name = config.rollout.weights_channel
    own = weight_channel(name).own_bytes
    return [MemoryItem(f"{name} of the {process}", servers * own, "an estimate" + servers_text(servers))] if own else []


def servers_text(count: int) -> str:
    return f", {count} servers" if count > 1 else ""


def _engine_lines(model: ModelBytes, config: RunConfig) -> Iterator[MemoryItem]:
    """Engine memory; for vllm an upper estimate of its profiling pass, by the same model's layers."""
    rollout, copies, parts = config.rollout, servers_per_gpu(config), 1
    tokens, sequences = config.data.max_prompt_length + config.longest_completion, rollout.max_concurrent_sequences
    prompts, decode = prefilled_prompts(config), sequences * tokens * model.decode_per_token
    columns = tokens
    if rollout.engine == "vllm":
        scheduled = int(rollout.engine_args.get("max_num_batched_tokens", 8192))
        prefill, decode = math.ceil(scheduled / config.data.max_prompt_length) * model.prefill, 0
        parts, sequences = rollout.tensor_parallel_size, 1
        why = f"one sequence of {tokens} tokens at least; vllm takes the rest of its share for more"
        working = f"a step of {scheduled} tokens"
    else:  # it takes prompts while at most three quarters of its sequences run
        prefill = prompts * (model.prefill + config.data.max_prompt_length * model.cache_per_token)
        prefill -= sequences * tokens * model.cache_per_token // 4
        columns = cache_columns(tokens)
        why = f"{sequences} sequences (rollout.max_concurrent_sequences) of {tokens} tokens, in blocks of {CACHE_BLOCK}"
        if config.environment.is_used:
            why += ": those that run, and rows that are parked between two turns"
        working = f"prefill of {prompts} prompts, or sampling"
    per_logit = TRUNCATION_BYTES if rollout.top_p < 1 or rollout.top_k or rollout.min_p else SAMPLING_BYTES
    sampling = rollout.max_concurrent_sequences * model.vocabulary * per_logit
    most = copies * max(prefill, decode, sampling)
    in_8_bits = rollout.engine == "vllm" and bool(rollout.quantization)
    weights = model.weights - (model.saved_in_8_bits if in_8_bits else 0)
    held = f"{config.model.dtype}, linear layers in {rollout.quantization}" if in_8_bits else config.model.dtype
    yield MemoryItem("weights", copies * weights // parts, held + servers_text(copies))
    yield MemoryItem("KV cache", copies * sequences * columns * model.cache_per_token // parts, why)
    yield MemoryItem(WORKING, most, working)
    yield allocator(most)
    yield from _graphs(config, copies)
    yield from _context(rollout.device, "rollout server", copies)


def evaluates_beside_training(config: RunConfig) -> bool:
    """True if servers keep a version to evaluate it while newer ones are published (learner/loop/step_schedule.py)."""
    plan = config.evaluation
    planned = bool(config.data.val_files) and (plan.before_training or plan.every_steps > 0)
    return planned and config.trainer.mode == "async" and config.largest_staleness > 0


def published_versions(config: RunConfig) -> int:
    """Most versions in shared memory at a time."""
    return PUBLISHED_VERSIONS + evaluates_beside_training(config)


def longest_sequence(config: RunConfig) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def prefilled_prompts(config: RunConfig) -> int:
    """Prompts that the hf engine takes through the model in one pass."""
    smallest = min([config.trajectories_per_group] + [config.evaluation.group_size] * bool(config.data.val_files))
    together = max(1, config.rollout.max_concurrent_sequences // smallest)
    rebuilds = config.trainer.mode == "async" and config.rollout.weight_update == "recompute"
    return together if rebuilds else min(together, max(1, PREFILL_TOKENS // config.data.max_prompt_length))


# --- what others need of a plan ------------------------------------------------------------------


def vllm_memory_utilization(config: RunConfig, device_bytes: int) -> float:
    """vLLM's `gpu_memory_utilization`: the part of a whole device that the budget leaves to one engine.

    `device_bytes` is the device's total memory. vLLM counts its own context in its share, but not what arrives beside
    its model: that is taken off, and what the learner holds meanwhile.
    """
    sharing = device_sharing(config)
    learner = arriving = 0
    if sharing == "turns":
        asleep = (*_context(config.learner.device, "learner"), *nccl_of_ranks(config))
        learner = sum(line.nbytes for line in asleep)
    elif sharing == "together" or config.rollout.uses_device_channel:
        model = rehearse(config)
        arriving = sum(line.nbytes for line in _arriving_lines(model, config))
        if sharing == "together":
            learner = sum(line.nbytes for line in _learner_lines(model, config))
    budget = min(config.gpu_memory.budget_gib * GIB, device_bytes)
    share = math.floor((budget - learner - arriving) / servers_per_gpu(config) / device_bytes * 1000) / 1000
    if share <= 0:
        raise UserError(
            f"gpu_memory.budget_gib is {config.gpu_memory.budget_gib:g}, of which the learner holds "
            f"{learner / GIB:.1f} GiB while vLLM works, and new weights take {arriving / GIB:.1f}: nothing is left for "
            f"vLLM. Raise it, or use another device{' or rollout.weights_channel=shm' if arriving else ''}"
        )
    return share
