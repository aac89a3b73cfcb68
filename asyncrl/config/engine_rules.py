"""What an engine cannot do on any machine. What depends on the machine is checked where the engine is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.config.schema import RunConfig


def engine_problems(config: RunConfig) -> list[str]:
    """One line for each setting that the chosen engine would have to ignore, with its fix."""
    rollout = config.rollout
    problems: list[str] = []
    if rollout.engine != "vllm" and rollout.tensor_parallel_size != 1:
        problems.append(
            f"rollout.tensor_parallel_size is {rollout.tensor_parallel_size}, but the {rollout.engine} engine runs on "
            "one device. Set rollout.engine=vllm or rollout.tensor_parallel_size=1"
        )
    if rollout.engine == "hf" and rollout.engine_args:
        problems.append(
            f"rollout.engine_args has {sorted(rollout.engine_args)}, but the hf engine takes no arguments. Leave them "
            "out"
        )
    if rollout.engine != "scripted" and rollout.logprobs == "raw":
        problems.append(
            f"rollout.logprobs is raw, but the {rollout.engine} engine returns those of the distribution it samples "
            "from. Set rollout.logprobs=processed"
        )
    if rollout.engine == "scripted" and config.alignment.rows:
        problems.append("rollout.engine=scripted makes up its log-probs: set alignment.rows=0")
    return problems
