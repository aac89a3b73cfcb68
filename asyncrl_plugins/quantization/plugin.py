"""Descriptions of weights of 8 and 4 bits, and configurations that they refuse.

With `rollout.quantization` the behaviour policy is another one than the learner's at every staleness, 0 included. The
recorded log-probs are its own: pi_proximal / pi_behaviour is the importance ratio, and something has to weigh by it.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.installed_methods import method_of
from asyncrl.config.parts import ROLLOUT_ENGINES, BaseWeights, RolloutWeights
from asyncrl.config.run_sections import RunSections

ENGINES = ("hf", "vllm")
"""Engines that sample with such weights."""
IN_VLLM = {
    "problems": "asyncrl_plugins.quantization.vllm_rules:problems",
    "saved_bytes": "asyncrl_plugins.quantization.grid:saved_bytes",
}
UNWEIGHED_PROXIMAL = ("behaviour", "linear", "loglinear")
"""Values of algorithm.proximal that are the behaviour policy itself for tokens of the learner's own version."""


def problems(config: RunSections) -> Iterator[str]:
    """Name each setting that quantised rollouts do not go with, with its fix."""
    rollout = config.rollout
    setting = f"rollout.quantization is {rollout.quantization}"
    if rollout.engine not in ENGINES:
        others = " or ".join(f"rollout.engine={name}" for name in ENGINES)
        yield (
            f"{setting}, and the engine is {rollout.engine}, {ROLLOUT_ENGINES[rollout.engine].not_quantized}. Set "
            f"{others}, or leave rollout.quantization out"
        )
    yield from _unweighed(config, setting, "leave rollout.quantization out")


def _unweighed(config: RunSections, setting: str, way_out: str) -> Iterator[str]:
    """Say that nothing weighs the policy that samples by the learner's, where both differ by `setting`."""
    algorithm = config.algorithm
    loss = method_of("policy_loss", algorithm.policy_loss)
    if loss and loss.weighs_behaviour:
        return
    sampled_by = f"{setting}: the policy that samples is not the learner's, at any staleness"
    if algorithm.proximal in UNWEIGHED_PROXIMAL:
        yield (
            f"{sampled_by}, and algorithm.proximal is {algorithm.proximal}, under which nothing weighs one by the "
            "other. Set algorithm.proximal=recompute and algorithm.correction.kind=token_tis"
        )
    elif algorithm.correction.kind == "none":
        yield (
            f"{sampled_by}, and algorithm.correction.kind is none. Set algorithm.correction.kind=token_tis (or another "
            f"one of docs/algorithms.md), or {way_out}"
        )


def base_problems(config: RunSections) -> Iterator[str]:
    """Name each setting that a base in 4 bits does not go with, with its fix."""
    model, rollout, learner = config.model, config.rollout, config.learner
    setting = f"model.quantization is {model.quantization}"
    if rollout.quantization == "nf4" and rollout.engine != "hf":
        yield (
            f"rollout.quantization is nf4, and the engine is {rollout.engine}: only hf samples with weights of 4 bits. "
            "Set rollout.engine=hf, or leave rollout.quantization out"
        )
    if not model.quantization:
        yield from _unweighed(config, "rollout.quantization is nf4", "leave rollout.quantization out")
        return
    if not model.lora.rank:
        yield (
            f"{setting} and model.lora.rank is 0: weights of 4 bits cannot be trained. Set model.lora.rank=16, or "
            "leave model.quantization out"
        )
    if learner.is_divided:
        yield (
            f"{setting}, and learner.engine is {learner.engine}, which divides weights over ranks, as those of 4 bits "
            "cannot be. Set learner.engine=torch, or leave model.quantization out"
        )
    samples = ROLLOUT_ENGINES[rollout.engine].has_model
    if samples and not rollout.precision(model.quantization):
        engine = f"{setting}, and rollout.engine is {rollout.engine}, which samples with a base in model.dtype"
        yield from _unweighed(config, engine, "set rollout.engine=hf")


# Limits are three times the largest difference in docs/lab-log/agreement.md, for every dtype. vLLM rounds a layer's
# inputs, too, with a scale for each token; never the output layer, and by itself the vision tower.
FP8 = RolloutWeights(
    implementation="asyncrl_plugins.quantization.grid:fp8",
    problems=problems,
    max_logprob_difference=3.0,
    held_by={"vllm": IN_VLLM | {"scheme": "fp8_per_channel_static"}},
)
INT8 = RolloutWeights(
    implementation="asyncrl_plugins.quantization.grid:int8",
    problems=problems,
    max_logprob_difference=1.0,
    held_by={
        "vllm": IN_VLLM | {"scheme": "int8_per_channel_static", "module": "asyncrl_plugins.quantization.vllm_int8"}
    },
)
# The limit is for engines whose base has model.dtype. The hf engine has the learner's own values, within the usual one.
NF4 = BaseWeights(
    implementation="asyncrl_plugins.quantization.nf4:nf4",
    held_by_learner="asyncrl_plugins.quantization.nf4:held_by_learner",
    planned="asyncrl_plugins.quantization.nf4_plan:planned",
    card="asyncrl_plugins.quantization.nf4_card:write_card",
    problems=base_problems,
    max_logprob_difference=5.0,
    packages=("bitsandbytes",),
    extra="qlora",
)
