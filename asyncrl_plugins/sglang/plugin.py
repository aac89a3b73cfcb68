"""Description of the sglang engine: its settings, and configurations that it refuses on any machine."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.parts import RolloutEngine
from asyncrl.config.run_sections import RunSections
from asyncrl.config.sections import Section


class SGLangConfig(Section):
    """SGLang's environment (`rollout.engine: sglang`)."""

    python: str = ""
    """Python of SGLang's environment; empty means that of `.venv-sglang` beside the environment of this process, which
    `make install-sglang` makes."""


def problems(config: RunSections) -> Iterator[str]:
    """Name each setting that SGLang would have to ignore, with its fix."""
    rollout = config.rollout
    if config.model.float32_head:
        yield (
            "model.float32_head is true, but sglang computes logits in model.dtype, and the two sides would differ. "
            "Set model.float32_head=false or rollout.engine=hf"
        )
    if rollout.truncates:
        yield (
            f"rollout.top_p is {rollout.top_p:g}, top_k {rollout.top_k} and min_p {rollout.min_p:g}, and sglang's "
            "log-probs are of the distribution before it is cut off. Leave them out, or set rollout.engine=vllm"
        )
    refused = {
        f"model.lora.rank is {config.model.lora.rank}, and adapters have not been run with sglang. Set "
        "model.lora.rank=0": config.model.lora.rank > 0,
        "rollout.weight_update is keep, and sglang cannot tell which of its cached prefixes are of old weights. Set "
        "rollout.weight_update=recompute": rollout.weight_update == "keep",
        f"rollout.weights_channel is {rollout.weights_channel}, and sglang takes new weights from host memory. Set "
        "rollout.weights_channel=auto": rollout.uses_device_channel,
        f"gpu_memory.budget_gib is {config.gpu_memory.budget_gib:g}, and nothing is known of sglang's memory. Set "
        "rollout.engine_args.mem_fraction_static": config.gpu_memory.budget_gib > 0,
    }
    for problem, is_so in refused.items():
        if is_so:
            yield f"{problem}, or rollout.engine=vllm"


ENGINE = RolloutEngine(
    implementation="asyncrl_plugins.sglang.engine:SGLangEngine",
    section=SGLangConfig,
    problems=problems,
    machine_problems="asyncrl_plugins.sglang.rules:problems",
    installation="asyncrl_plugins.sglang.environment:installation",
    compiles=True,
    not_quantized="whose fp8 layers would take the bits of a new version for quantised ones: its reload for training "
    "(load_format flash_rl) knows no vision-language model",
    metric_prefix="sglang:",
)
