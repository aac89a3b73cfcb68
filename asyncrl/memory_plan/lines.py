"""Lines of a memory plan, and the formulas of engines: those of fsdp2 and hf, and the form of a plug-in's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from asyncrl.config.parts import (
    CACHE_BLOCK,
    LEARNER_ENGINES,
    NCCL_BYTES,
    PREFILL_TOKENS,
    ROLLOUT_ENGINES,
    cache_columns,
)
from asyncrl.config.schema import RunConfig
from asyncrl.config.service_sections import LearnerConfig, RolloutConfig
from asyncrl.memory_plan import GIB
from asyncrl.memory_plan.rehearsal import ModelBytes
from asyncrl.plugins import descriptions, implementation

CONTEXT_BYTES = 5 * GIB // 8
"""CUDA's context and the libraries' workspaces of a process that has used the device: 619 MiB on an H100 (CUDA 13)."""
ALLOCATOR_SHARE = 0.05
"""Share of the tensors that come and go which torch's allocator loses to rounding and gaps. An estimate."""
WORKING = "working memory"
"""Name of the line that a pass takes."""


@dataclass(frozen=True)
class MemoryItem:
    name: str
    nbytes: int
    why: str = ""


def allocator(working: int) -> MemoryItem:
    return MemoryItem("allocator", int(ALLOCATOR_SHARE * working), f"{ALLOCATOR_SHARE:.0%} of it, an estimate")


def count(parameters: int) -> str:
    """`3.98 billion`"""
    return f"{parameters / 1e9:.3g} billion" if parameters >= 1e9 else f"{parameters / 1e6:.3g} million"


def servers_text(count: int) -> str:
    return f", {count} servers" if count > 1 else ""


def context(device: str, process: str, copies: int = 1) -> list[MemoryItem]:
    """Context memory of a process; `auto` counts as a GPU, even where there is none."""
    return [] if device == "cpu" else [MemoryItem(f"context of the {process}", copies * CONTEXT_BYTES, "an estimate")]


# --- learners that divide the model --------------------------------------------------------------

GRADIENTS = "parts of the gradients"
Change = Mapping[str, object]
"""Values of dotted keys."""


@dataclass(frozen=True)
class RankMemory:
    """Formula of the memory of an engine that divides the model (`LearnerEngine.memory`)."""

    lines: Callable[[ModelBytes, RunConfig, str], Iterator[MemoryItem]]
    """Memory of one rank on its device, without its context; the text describes a micro-batch."""
    offloaded: Callable[[ModelBytes, RunConfig], int]
    """Bytes in host memory of one rank with learner.cpu_offload."""
    smaller: Callable[[RunConfig], Iterable[Change]] = lambda config: ()
    """Changes of the engine's own settings that take less memory."""


def memory_of(engine: str) -> RankMemory:
    """The formula of the chosen engine, which divides the model and has one: `rehearse` refuses others."""
    return implementation(LEARNER_ENGINES[engine].memory)


def nccl_of_ranks(learner: LearnerConfig) -> list[MemoryItem]:
    """NCCL memory of a rank on its GPU, awake and asleep."""
    on_gpus = learner.num_processes > 1 and learner.device != "cpu"
    return [MemoryItem("NCCL of the ranks", NCCL_BYTES, "an estimate")] if on_gpus else []


def _fsdp_lines(model: ModelBytes, config: RunConfig, what: str) -> Iterator[MemoryItem]:
    ranks, offloads = config.learner.num_processes, offloads_parts(config.learner)
    if not offloads:
        yield from part_lines(model, config.model.dtype, ranks)
    passing = working = 0
    scored = list(model.divided_references)
    for engine in (model, model.critic) if model.critic else (model,):
        assert engine.divided is not None
        passing = max(passing, engine.passing)
        found = engine.divided.working(ranks, engine.passing, engine.in_layers, cpu_offload=offloads)
        working = max(working, found)
        scored += [engine.divided] if engine is not model else []
    gathered = working - passing + sum(role.scored(ranks) for role in scored)
    why = "whole weights of two layers, of embeddings and output layer, and a layer's gradients"
    yield MemoryItem("gathered layers", gathered, why)
    yield MemoryItem(WORKING, passing, what)
    yield allocator(working)


def part_lines(model: ModelBytes, dtype: str, ranks: int) -> Iterator[MemoryItem]:
    """Memory of one rank that outlasts a micro-batch."""
    assert model.divided is not None
    trained = model.divided.trained_part(ranks)
    frozen = "" if model.trained == model.parameters else f", what is frozen in {dtype}"
    kind = f"1/{ranks} of {count(model.parameters)}: what is trained in float32{frozen}"
    yield MemoryItem("parts of the weights", model.divided.part(ranks), kind)
    yield MemoryItem(GRADIENTS, trained, f"1/{ranks} of {count(model.trained)} that are trained, in float32")
    yield MemoryItem("parts of AdamW's moments", 2 * trained, "two averages of each")
    if model.critic and model.critic.divided:
        critic = model.critic.divided
        what = f"1/{ranks} of {count(model.critic.parameters)} with optimiser state"
        yield MemoryItem("parts of the critic", critic.part(ranks) + 3 * critic.trained_part(ranks), what)
    if references := model.divided_references:
        what = f"1/{ranks} of its weights, in float32 what is trained of the policy"
        yield MemoryItem("parts of the reference policy", sum(each.part(ranks) for each in references), what)


def offloads_parts(learner: LearnerConfig) -> bool:
    """True where parts are in host memory, and the device is another one."""
    return learner.cpu_offload and learner.device != "cpu"


def _fsdp_offloaded(model: ModelBytes, config: RunConfig) -> int:
    return sum(line.nbytes for line in part_lines(model, config.model.dtype, config.learner.num_processes))


FSDP_MEMORY = RankMemory(_fsdp_lines, _fsdp_offloaded)


# --- rollout engines -----------------------------------------------------------------------------

SAMPLING_BYTES, TRUNCATION_BYTES = 28, 60
"""Per logit while tokens are drawn (fp32 log-probs, fp64 cumulative distribution), and with top-k, top-p or min-p."""


@dataclass(frozen=True)
class EngineMemory:
    """Formula of the memory of a rollout engine (`RolloutEngine.memory`)."""

    lines: Callable[[ModelBytes, RunConfig, int], Iterator[MemoryItem]]
    """Memory of a number of engines on one device, without their contexts."""
    asleep: Callable[[RunConfig], list[MemoryItem]] = lambda config: []
    """Device memory that an engine keeps while it sleeps, beside its context."""
    asleep_on_host: Callable[[RunConfig], list[MemoryItem]] = lambda config: []
    """Host memory of a sleeping engine beside its weights."""
    fills_device: bool = False
    """True if the engine takes all that is left for its cache, and the lines have the least of it."""


def memory_of_engine(engine: str) -> EngineMemory:
    return implementation(ROLLOUT_ENGINES[engine].memory)


def sampling_bytes(model: ModelBytes, rollout: RolloutConfig) -> int:
    """Bytes of logits and probabilities while all sequences draw a token."""
    per_logit = TRUNCATION_BYTES if rollout.truncates else SAMPLING_BYTES
    return rollout.max_concurrent_sequences * model.vocabulary * per_logit


def prefilled_prompts(config: RunConfig) -> int:
    """Prompts of the largest length whose tokens the hf engine takes through the model in one pass."""
    most, longest = config.rollout.max_concurrent_sequences, config.data.max_prompt_length
    smallest = min([config.trajectories_per_group] + [config.evaluation.group_size] * bool(config.data.val_files))
    together = max(1, most // smallest)
    admitted = min(together, max(1, PREFILL_TOKENS // longest))
    if config.environment.is_used:  # a later turn is a prompt of its own, with all turns before it
        row = longest + config.longest_completion
        admitted = max(admitted, -(-min(most, max(1, PREFILL_TOKENS // row)) * row // longest))
    rebuilds = config.trainer.mode == "async" and config.rollout.weight_update == "recompute"
    return max(together, admitted) if rebuilds else admitted


def _hf_lines(model: ModelBytes, config: RunConfig, copies: int) -> Iterator[MemoryItem]:
    tokens, sequences = (
        config.data.max_prompt_length + config.longest_completion,
        config.rollout.max_concurrent_sequences,
    )
    prompts, decode = prefilled_prompts(config), sequences * tokens * model.decode_per_token
    # It takes prompts while at most three quarters of its sequences run.
    prefill = prompts * (model.prefill + config.data.max_prompt_length * model.cache_per_token)
    prefill -= sequences * tokens * model.cache_per_token // 4
    most = copies * max(prefill, decode, sampling_bytes(model, config.rollout))
    why = f"{sequences} sequences (rollout.max_concurrent_sequences) of {tokens} tokens, in blocks of {CACHE_BLOCK}"
    cache = sequences * cache_columns(tokens) * model.cache_per_token
    yield MemoryItem("weights", copies * model.weights, config.model.dtype + servers_text(copies))
    yield MemoryItem("KV cache", copies * cache, why)
    yield MemoryItem(WORKING, most, f"prefill of {prompts} prompts, or sampling")
    yield allocator(most)
    for part in descriptions("decode_batches").values():
        yield from implementation(part.facts["memory"])(model, config, copies)


HF_MEMORY = EngineMemory(_hf_lines)
