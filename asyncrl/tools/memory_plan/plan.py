"""The rehearsed bytes put together: what each device holds while its owner works, and what the host holds."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from asyncrl.config.channel_rules import DEVICE_CHANNELS
from asyncrl.config.devices import same_device
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.models.folder import read_config
from asyncrl.tools.memory_plan.limits import NCCL_BYTES
from asyncrl.tools.memory_plan.rehearsal import (
    EngineBytes,
    LearnerBytes,
    longest_sequence,
    prefilled_prompts,
    rehearse_engine,
    rehearse_learner,
    scheduled_tokens,
)

logger = logging.getLogger(__name__)

GIB = 2**30
CONTEXT_BYTES = GIB // 2
"""Of a process that has used the device: CUDA's context and the libraries' workspaces. An estimate."""
ALLOCATOR_SHARE = 0.05
"""What torch's allocator loses to rounding and gaps, of the tensors that come and go. An estimate."""
SENT_VERSIONS = 2
"""In the learner's device memory, over a device channel: the newest, and one that is still being sent."""
PUBLISHED_VERSIONS = 3
"""In shared memory (protocol/weights.py): the newest two, and one that a slow server may still have mapped."""

Sharing = Literal["turns", "together", "apart"]
"""Of a device between learner and engine: one after the other (sync mode), at the same time, or not at all."""


@dataclass(frozen=True)
class Line:
    name: str
    nbytes: int
    why: str = ""


@dataclass(frozen=True)
class Phase:
    """What one device holds at the worst moment of something."""

    name: str
    lines: tuple[Line, ...]

    @property
    def nbytes(self) -> int:
        return sum(line.nbytes for line in self.lines)


@dataclass(frozen=True)
class MemoryPlan:
    config: RunConfig
    learner: LearnerBytes
    engine: EngineBytes | None
    """None for the scripted engine, which has no model."""
    sharing: Sharing
    phases: tuple[Phase, ...]
    """Of one device each; each must fit the budget."""
    host: tuple[Line, ...]

    @property
    def budget(self) -> int:
        """Bytes; 0 where there is none."""
        return int(self.config.gpu_memory.budget_gib * GIB)

    @property
    def peak(self) -> int:
        return max(phase.nbytes for phase in self.phases)

    @property
    def excess(self) -> int:
        """Bytes over the budget, of all phases together."""
        return sum(max(0, phase.nbytes - self.budget) for phase in self.phases)

    @property
    def publications(self) -> int:
        """Bytes of published versions in shared memory."""
        return PUBLISHED_VERSIONS * self.learner.published


def make_plan(config: RunConfig, *, before: MemoryPlan | None = None) -> MemoryPlan:
    """Seconds, and no weights: the model is rehearsed on the meta device. Raises UserError for what is no model.

    Of the plan `before`, of a configuration that differs little, what would be the same is taken over.
    """
    read_config(config.model)  # refuses what can be planned and not trained
    if before is not None and _same_for_learner(config, before.config):
        learner = before.learner
    else:
        learner = _learner_bytes(config)
    if before is not None and _same_for_engine(config, before.config):
        engine = before.engine
    elif config.rollout.engine == "scripted":
        engine = None
    else:
        with _named_failure(config):
            engine = rehearse_engine(config)
    sharing = device_sharing(config)
    learning = Phase("learner awake", (*learner_lines(learner, config), *_sent(learner, config)))
    phases = [learning]
    if engine is not None:
        sampling = Phase("engine awake", (*engine_lines(engine, config), *_received(learner, config)))
        phases = _combine(learning, sampling, sharing)
    return MemoryPlan(config, learner, engine, sharing, tuple(phases), tuple(_host_lines(config, learner, engine)))


def _learner_bytes(config: RunConfig) -> LearnerBytes:
    with _named_failure(config):
        return rehearse_learner(config, foreach=config.learner.device != "cpu")


@contextmanager
def _named_failure(config: RunConfig) -> Iterator[None]:
    """A model's own code may read values, which the meta device has not, or do what no rehearsal foresaw."""
    try:
        yield
    except UserError:
        raise
    except Exception as problem:
        logger.debug("the rehearsal of %s failed", config.model.path, exc_info=True)
        family = read_config(config.model).get("model_type", "a model without model_type")
        raise UserError(
            f"memory cannot be planned for models of the family {family} ({config.model.path}): a rehearsal without "
            f"weights failed ({type(problem).__name__}: {' '.join(str(problem).split())[:200]}). It may be trained all "
            "the same: leave gpu_memory.budget_gib at 0, and try it with a small batch.tokens_per_microbatch"
        ) from problem


def _same_for_learner(config: RunConfig, before: RunConfig) -> bool:
    return changed(config, {"rollout": before.rollout, "trainer": before.trainer}) == before


def _same_for_engine(config: RunConfig, before: RunConfig) -> bool:
    tokens = before.batch.tokens_per_microbatch
    return changed(config, {"learner": before.learner, "batch.tokens_per_microbatch": tokens}) == before


def device_sharing(config: RunConfig) -> Sharing:
    if config.trainer.mode == "sync":
        return "turns"
    return "together" if same_device(config, cuda=torch.cuda.is_available()) else "apart"


def _combine(learning: Phase, sampling: Phase, sharing: Sharing) -> list[Phase]:
    if sharing == "apart":
        return [learning, sampling]
    if sharing == "together":
        return [Phase("learner and engine at the same time", learning.lines + sampling.lines)]
    return [
        Phase(learning.name, (*learning.lines, *_only_context(sampling))),
        Phase(sampling.name, (*sampling.lines, *_only_context(learning))),
    ]


def _only_context(other: Phase) -> list[Line]:
    """All that a process which sleeps leaves on the device."""
    return [line for line in other.lines if line.name.startswith("context")]


def _context(device: str, process: str, copies: int = 1) -> list[Line]:
    """`auto` is planned as a GPU, even here where there may be none yet."""
    return [] if device == "cpu" else [Line(f"context of the {process}", copies * CONTEXT_BYTES, "an estimate")]


def learner_lines(learner: LearnerBytes, config: RunConfig) -> list[Line]:
    batch = config.batch
    coming = max(learner.passing, learner.stepping)
    what = (
        f"forward and backward of {batch.tokens_per_microbatch} tokens (batch.tokens_per_microbatch)"
        if learner.passing >= learner.stepping
        else "the optimiser's update, one copy of what is trained"
    )
    dtype = config.model.dtype
    return [
        Line("weights", learner.weights, f"{count(learner.parameters)} in {dtype}"),
        Line("gradients", learner.gradients, f"{count(learner.trained)} are trained"),
        Line("AdamW moments", learner.moments, "two averages of each"),
        Line("working memory", coming, what),
        Line("allocator", int(ALLOCATOR_SHARE * coming), f"{ALLOCATOR_SHARE:.0%} of it, an estimate"),
        *_context(config.learner.device, "learner"),
    ]


def _sent(learner: LearnerBytes, config: RunConfig) -> list[Line]:
    """What a device channel takes of the learner's device (docs/decisions/013)."""
    channel = config.rollout.weights_channel
    if channel not in DEVICE_CHANNELS:
        return []
    why = f"rollout.weights_channel={channel}: the newest version, and one that is still being sent"
    return [Line("weights that are sent", SENT_VERSIONS * learner.published, why), *_nccl(config, "learner")]


def _received(learner: LearnerBytes, config: RunConfig) -> list[Line]:
    """And of an engine's: a whole version on each worker's, whatever part of the model is there."""
    channel = config.rollout.weights_channel
    if channel not in DEVICE_CHANNELS:
        return []
    why = f"rollout.weights_channel={channel}: a whole version, beside the model" + _servers(config)
    arriving = config.rollout.servers * learner.published
    return [Line("weights that arrive", arriving, why), *_nccl(config, "rollout server")]


def _nccl(config: RunConfig, process: str) -> list[Line]:
    """One group with each server."""
    if config.rollout.weights_channel != "nccl":
        return []
    return [Line(f"NCCL of the {process}", config.rollout.servers * NCCL_BYTES, "an estimate" + _servers(config))]


def _servers(config: RunConfig) -> str:
    return f", {config.rollout.servers} servers" if config.rollout.servers > 1 else ""


def count(parameters: int) -> str:
    """`3.98 billion`"""
    return f"{parameters / 1e9:.3g} billion" if parameters >= 1e9 else f"{parameters / 1e6:.3g} million"


def engine_lines(engine: EngineBytes, config: RunConfig) -> list[Line]:
    rollout = config.rollout
    tokens = longest_sequence(config)
    parts = rollout.tensor_parallel_size if rollout.engine == "vllm" else 1
    copies = rollout.servers
    sequences = 1 if rollout.engine == "vllm" else rollout.max_concurrent_sequences
    if rollout.engine == "vllm":
        why = f"one sequence of {tokens} tokens at least; vllm takes the rest of its share for more"
        working = f"a step of {scheduled_tokens(config)} tokens"
    else:
        why = f"{sequences} sequences (rollout.max_concurrent_sequences) of {tokens} tokens"
        working = f"prefill of {prefilled_prompts(config)} prompts, or sampling"
    cache = sequences * engine.cache_per_sequence
    return [
        Line("weights", copies * engine.weights // parts, config.model.dtype + _servers(config)),
        Line("KV cache", copies * cache // parts, why),
        Line("working memory", copies * engine.working, working),
        Line("allocator", int(ALLOCATOR_SHARE * copies * engine.working), f"{ALLOCATOR_SHARE:.0%} of it, an estimate"),
        *_context(config.rollout.device, "rollout server", copies),
    ]


def _host_lines(config: RunConfig, learner: LearnerBytes, engine: EngineBytes | None) -> list[Line]:
    lines = [
        Line(
            "published weights, in /dev/shm",
            PUBLISHED_VERSIONS * learner.published,
            "the newest two versions, and one that a server may still load",
        )
    ]
    if config.trainer.mode == "sync":
        lines.append(Line("learner asleep", learner.weights + learner.moments, "weights and moments, pinned"))
        if engine is not None:
            lines.append(_engine_asleep(config, learner, engine))
    return lines


def _engine_asleep(config: RunConfig, learner: LearnerBytes, engine: EngineBytes) -> Line:
    """At level 2 an engine forgets what is published to it again; the base of an adapter never is."""
    if config.rollout.sleep_level == 1:
        return Line("engine asleep", engine.weights, "weights, pinned")
    kept = max(0, engine.weights - learner.published)
    why = "the weights that are not published, pinned" if config.model.lora.rank else "forgotten"
    return Line("engine asleep", kept, f"{why} (rollout.sleep_level=2)")


# --- what others need of a plan ------------------------------------------------------------------


def vllm_memory_utilization(config: RunConfig, device_bytes: int) -> float:
    """vLLM's `gpu_memory_utilization`: the part of a whole device that the budget leaves to one engine.

    `device_bytes` is the device's total memory. vLLM counts its own context in its share, but not what arrives beside
    its model: that is taken off, and what the learner holds meanwhile.
    """
    sharing = device_sharing(config)
    learner = arriving = 0
    if sharing == "turns":
        learner = sum(line.nbytes for line in _context(config.learner.device, "learner"))
    elif sharing == "together" or config.rollout.weights_channel in DEVICE_CHANNELS:
        rehearsed = _learner_bytes(config)
        arriving = sum(line.nbytes for line in _received(rehearsed, config))
        if sharing == "together":
            learner = sum(line.nbytes for line in (*learner_lines(rehearsed, config), *_sent(rehearsed, config)))
    budget = min(config.gpu_memory.budget_gib * GIB, device_bytes)
    share = math.floor((budget - learner - arriving) / config.rollout.servers / device_bytes * 1000) / 1000
    if share <= 0:
        raise UserError(
            f"gpu_memory.budget_gib is {config.gpu_memory.budget_gib:g}, of which the learner holds "
            f"{learner / GIB:.1f} GiB while vLLM works, and new weights take {arriving / GIB:.1f}: nothing is left for "
            f"vLLM. Raise it, or use another device{' or rollout.weights_channel=shm' if arriving else ''}"
        )
    return share


def changed(config: RunConfig, changes: Mapping[str, object]) -> RunConfig:
    """The configuration with other values at these dotted keys; not checked again."""
    for key, value in changes.items():
        config = _changed(config, key.split("."), value)
    return config


def _changed(section: object, path: list[str], value: object):  # any section of the configuration
    name, *rest = path
    inner = _changed(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: inner})  # pyright: ignore[reportAttributeAccessIssue]
