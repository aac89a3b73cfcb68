"""Weights of lower precision that completions are sampled with (`rollout.quantization`), which plug-ins bring
(`asyncrl.models`)."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.plugins import Part, descriptions, there_are


@dataclass(frozen=True, kw_only=True)
class RolloutWeights(Part):
    """Description of such weights.

    The implementation is called with the hf engine's model, which it rounds in place. It returns a function from
    published tensors, with their names, to those that the model gets.
    """

    max_logprob_difference: float
    """Default of alignment.max_logprob_difference: the policy that samples is another one than the learner's."""
    vllm_scheme: str
    """vLLM's name of the weights in its online quantisation."""
    vllm_problems: str
    """`module:function`, called with the configuration and `cuda`: a line, with its fix, for each thing that vLLM
    lacks."""
    vllm_module: str = ""
    """Module that vLLM's processes import before they load the model."""
    saved_bytes: str
    """`module:function`, called with a model: bytes by which its weights are smaller in vLLM."""


def rollout_weights(name: str) -> RolloutWeights | None:
    """None for an empty name. Raises ValueError for one that no installed plug-in has."""
    if not name:
        return None
    parts = {each: part for each, part in descriptions("models").items() if isinstance(part, RolloutWeights)}
    if name not in parts:
        raise ValueError(f"rollout.quantization is {name!r}, and {there_are(list(parts), name, 'models')}")
    return parts[name]
