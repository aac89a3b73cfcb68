"""Descriptions of weights of 8 bits, and configurations that they refuse.

With `rollout.quantization` the behaviour policy is another one than the learner's at every staleness, 0 included. The
recorded log-probs are its own: pi_proximal / pi_behaviour is the importance ratio, and something has to weigh by it.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.installed_methods import method_of
from asyncrl.config.parts import ROLLOUT_ENGINES, RolloutWeights
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
    rollout, algorithm = config.rollout, config.algorithm
    setting = f"rollout.quantization is {rollout.quantization}"
    if rollout.engine not in ENGINES:
        others = " or ".join(f"rollout.engine={name}" for name in ENGINES)
        yield (
            f"{setting}, and the engine is {rollout.engine}, {ROLLOUT_ENGINES[rollout.engine].not_quantized}. Set "
            f"{others}, or leave rollout.quantization out"
        )
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
            "one of docs/algorithms.md), or leave rollout.quantization out"
        )


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
