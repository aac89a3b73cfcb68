"""Weights of lower precision that completions are sampled with (`rollout.quantization`), which plug-ins bring
(`asyncrl.models`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl.plugins import Part, descriptions, there_are


@dataclass(frozen=True, kw_only=True)
class RolloutWeights(Part):
    """Description of such weights.

    The implementation is called with the hf engine's model, which it rounds in place. It returns a function from
    published tensors, with their names, to those that the model gets.
    """

    max_logprob_difference: float
    """Default of alignment.max_logprob_difference: the policy that samples is another one than the learner's."""
    held_by: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Facts for each engine that holds the weights in this precision itself, by its name. Its page says which."""


def rollout_weights(name: str) -> RolloutWeights | None:
    """None for an empty name. Raises ValueError for one that no installed plug-in has."""
    if not name:
        return None
    parts = {each: part for each, part in descriptions("models").items() if isinstance(part, RolloutWeights)}
    if name not in parts:
        raise ValueError(f"rollout.quantization is {name!r}, and {there_are(list(parts), name, 'models')}")
    return parts[name]
