"""Settings that an inference or a training engine cannot fulfil on any machine. What depends on the machine is checked
where the engine is started."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from asyncrl.config.learner_engines import learner_engine
from asyncrl.config.rollout_engines import rollout_engine, rollout_engines
from asyncrl.config.rollout_weights import rollout_weights
from asyncrl.config.run_sections import RunSections

PREFILL_TOKENS = 16_384
"""Most padded prompt tokens that the hf engine admits in one forward pass (a single prompt may be longer)."""
GRADIENTS_IN_FLIGHT = 2
"""Gradients on their way to the host at a time, with learner.cpu_offload: the backward pass waits for the oldest, so
that the device holds no more than these besides the one that it makes."""
SMALLEST_8BIT, BLOCK_8BIT = 4096, 256
"""learner.optimizer=adamw_8bit: elements of a tensor from which its moments have 8 bits, and elements that share a
scale (bitsandbytes' own numbers)."""

CACHE_BLOCK = 32
"""Columns by which the hf engine's key-value cache grows: one step in so many copies it."""


def cache_columns(tokens: int) -> int:
    """Columns of the hf engine's key-value cache that have room for `tokens`, in whole blocks."""
    return -(-tokens // CACHE_BLOCK) * CACHE_BLOCK


def engine_problems(config: RunSections) -> Iterator[str]:
    """Name each setting that the chosen engine would have to ignore, with its fix."""
    rollout = config.rollout
    engine = rollout_engine(rollout.engine)
    if rollout.tensor_parallel_size != 1 and not engine.spans_devices:
        yield (
            f"rollout.tensor_parallel_size is {rollout.tensor_parallel_size}, but the {rollout.engine} engine runs on "
            f"one device. Set {_engines_on_several_devices()}rollout.tensor_parallel_size=1"
        )
    yield from _PROBLEMS.get(rollout.engine, engine.problems)(config)
    if weights := rollout_weights(rollout.quantization):
        yield from weights.problems(config)


def _engines_on_several_devices() -> str:
    wide = [f"rollout.engine={name}" for name, engine in rollout_engines().items() if engine.spans_devices]
    return "".join(f"{name} or " for name in wide)


def training_engine_problems(config: RunSections) -> Iterator[str]:
    """Name each setting that the learner's engine cannot fulfil, with its fix."""
    learner = config.learner
    yield from learner_engine(learner.engine).problems(config)
    if not learner.is_divided:
        if learner.num_processes > 1:
            yield (
                f"learner.num_processes is {learner.num_processes}, but learner.engine is torch, which keeps the whole "
                f"model on one device. Set learner.engine=fsdp2, or leave learner.num_processes out"
            )
        return
    if learner.optimizer != "adamw":
        yield (
            f"learner.optimizer is {learner.optimizer}, which steps whole tensors, and learner.engine is "
            f"{learner.engine}, which has parts of them. Set learner.engine=torch or learner.optimizer=adamw"
        )
    problems = {
        f"rollout.weights_channel is {config.rollout.weights_channel}, which copies a whole model from the device of a "
        "learner that is one process. Set rollout.weights_channel=auto": (config.rollout.uses_device_channel),
        "reference.offload is true, which moves a whole model (where the weights are divided, learner.cpu_offload "
        "keeps all parts in host memory). Set reference.offload=false": config.reference.offload,
    }
    for problem, is_so in problems.items():
        if is_so:
            yield f"learner.engine is {learner.engine}, but {problem}, or learner.engine=torch"
    if learner.num_processes > 1 and ":" in learner.device:
        yield (
            f"learner.device is {learner.device}, one GPU, and learner.num_processes is {learner.num_processes}: each "
            "rank has a GPU of its own. Set learner.device=cuda"
        )


def _hf_problems(config: RunSections) -> Iterator[str]:
    if config.rollout.engine_args:
        yield (
            f"rollout.engine_args has {sorted(config.rollout.engine_args)}, but the hf engine takes no arguments. "
            "Leave them out"
        )


def _scripted_problems(config: RunSections) -> Iterator[str]:
    if config.alignment.rows:
        yield "rollout.engine=scripted makes up its log-probs: set alignment.rows=0"


_PROBLEMS: dict[str, Callable[[RunSections], Iterable[str]]] = {
    "hf": _hf_problems,
    "scripted": _scripted_problems,
}
