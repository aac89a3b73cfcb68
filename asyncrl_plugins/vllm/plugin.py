"""Description of the vllm engine, and configurations that it refuses on any machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.config.parts import RolloutEngine
from asyncrl.config.run_sections import RunSections
from asyncrl.plugins import description, installed

COLDEST, HOTTEST = 0.01, 2.0
"""Temperatures that vLLM samples at, except 0 (greedy). It replaces lower ones without a word, and refuses higher."""
LARGEST_RANK = 512
"""Largest rank of adapters that vLLM has a slot for."""
ROUTED_EXPERTS = "routing_replay"
"""Token trace that vLLM has itself: the experts of each layer, as uint8 or, over 256 experts, uint16."""
TOWERS = ("clip_vision_model", "siglip_vision_model", "pixtral")
"""Types of the vision towers that vLLM's LLaVA can have."""


def problems(config: RunSections) -> Iterator[str]:
    """Name each setting that vLLM would have to ignore, with its fix."""
    if config.model.float32_head:
        yield (
            "model.float32_head is true, but vllm computes logits in model.dtype, and the two sides would differ. Set "
            "model.float32_head=false or rollout.engine=hf"
        )
    for section in ("rollout", "evaluation"):
        problem = temperature_problem(getattr(config, section).temperature)
        if problem:
            yield f"{section}.temperature is {problem}"
    if config.trainer.mode == "sync" and config.rollout.sleep_level == 2 and config.model.lora.rank:
        yield (
            f"trainer.mode is sync, model.lora.rank is {config.model.lora.rank} and rollout.sleep_level is 2: vllm "
            "would forget the base weights, and only adapters are published. Set rollout.sleep_level=1, or "
            "rollout.engine=hf, which keeps what is not published"
        )
    if config.model.lora.modules_to_save:
        yield (
            "model.lora.modules_to_save trains the connector beside adapters, and vllm's slot takes adapters alone. "
            "Set rollout.engine=hf, or model.lora.modules_to_save=[]"
        )
    if config.model.lora.rank > LARGEST_RANK:
        yield (
            f"model.lora.rank is {config.model.lora.rank}, and vllm takes at most {LARGEST_RANK}. Lower it, "
            "or set rollout.engine=hf"
        )


def temperature_problem(temperature: float) -> str:
    """Error message for a temperature outside vLLM's limits, from its value on; empty if valid."""
    if temperature > HOTTEST:
        return f"{temperature:g}; vllm takes at most {HOTTEST:g}. Lower it, or set rollout.engine=hf"
    if not 0 < temperature < COLDEST:
        return ""
    return (
        f"{temperature:g}; vllm samples no colder than {COLDEST} and would silently use that. Set it to "
        f"{COLDEST} or more (evaluation.temperature=0 is greedy)"
    )


def unserved(described: Mapping[str, Any]) -> str:
    """Part of a LLaVA or a plug-in's model, by its config.json, that vLLM has no code for; empty if it has all."""
    family = described.get("model_type")
    if family in installed("models"):
        return description("models", family).unserved.get("vllm", "")
    if family != "llava":
        return ""
    tower = (described.get("vision_config") or {}).get("model_type", "clip_vision_model")
    if tower not in TOWERS:
        return f"LLaVA with a tower of the type {tower}"
    act = described.get("projector_hidden_act")
    return f"LLaVA whose connector has the activation {act}" if act == "linear" else ""


ENGINE = RolloutEngine(
    implementation="asyncrl_plugins.vllm.engine:VLLMEngine",
    problems=problems,
    machine_problems="asyncrl_plugins.vllm.rules:problems",
    packages=("vllm",),
    extra="rollout-vllm",
    unserved=unserved,
    memory="asyncrl_plugins.vllm.memory:MEMORY",
    spans_devices=True,
    compiles=True,
    traces={ROUTED_EXPERTS},
    metric_prefix="vllm:",
)
