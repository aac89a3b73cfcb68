"""Refuses quantised rollouts that an engine cannot give, or that the learner would take for its own policy.

With `rollout.quantization` the behaviour policy is another one than the learner's at every staleness, 0 included. The
recorded log-probs are its own: pi_proximal / pi_behaviour is the importance ratio, and something has to weigh by it.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.installed_methods import method_of
from asyncrl.config.rollout_engines import rollout_engine
from asyncrl.config.run_sections import RunSections

QUANTIZATIONS = {"hf": ("fp8", "int8"), "vllm": ("fp8", "int8")}
"""Values of rollout.quantization besides none, by engine."""
UNWEIGHED_PROXIMAL = ("behaviour", "linear", "loglinear")
"""Values of algorithm.proximal that are the behaviour policy itself for tokens of the learner's own version."""


def quantization_problems(config: RunSections) -> Iterator[str]:
    """Name each setting that quantised rollouts do not go with, with its fix."""
    rollout, algorithm = config.rollout, config.algorithm
    if rollout.quantization == "none":
        return
    setting = f"rollout.quantization is {rollout.quantization}"
    if rollout.quantization not in QUANTIZATIONS.get(rollout.engine, ()):
        others = [f"rollout.engine={name}" for name, kinds in QUANTIZATIONS.items() if rollout.quantization in kinds]
        why_not = rollout_engine(rollout.engine).not_quantized
        others = [f"rollout.quantization={kind}" for kind in QUANTIZATIONS.get(rollout.engine, ())] + others
        yield (
            f"{setting}, and the engine is {rollout.engine}, {why_not}. Set {' or '.join(others)}, or "
            "rollout.quantization=none"
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
            "one of docs/algorithms.md), or rollout.quantization=none"
        )
