"""Numbers of a model of experts, from its config.json, and experts of tokens as bytes. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")


@dataclass(frozen=True)
class ExpertShape:
    layers: int
    """All layers of the language model: those without experts have zeros, as vLLM has it."""
    experts: int
    chosen: int
    """Experts of a token in each layer."""

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> ExpertShape | None:
        """Shape that the language model's part of a config.json names; None where it names no experts."""
        experts, chosen = (
            next((described[key] for key in keys if described.get(key)), 0) for keys in (EXPERTS, CHOSEN)
        )
        layers = described.get("num_hidden_layers")
        numbers = (layers, experts, chosen)
        if not all(isinstance(number, int) and number > 0 for number in numbers) or chosen > experts:
            return None
        return cls(layers or 0, experts, chosen)

    @property
    def dtype(self) -> str:
        """Smallest integer that holds an expert's number, as vLLM has it."""
        return "<u1" if self.experts <= 256 else "<u2"

    @property
    def width(self) -> int:
        """Bytes of a token."""
        return self.layers * self.chosen * int(self.dtype[-1])

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """[N, width] uint8 -> [N, layers, chosen]"""
        return np.ascontiguousarray(rows).view(self.dtype).reshape(len(rows), self.layers, self.chosen)

    def problem(self, rows: np.ndarray, layers: list[int]) -> str:
        """Fault of [N, width] uint8 as experts of these layers; empty: none."""
        found = self.numbers(rows)[:, layers]
        if found.size and (largest := int(found.max())) >= self.experts:
            return f"expert {largest}, of {self.experts} that the model has"
        ordered = np.sort(found, axis=-1)
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        if twice.any():
            token, layer = (int(place) for place in np.argwhere(twice)[0])
            return (
                f"token {token} has the experts {found[token, layer].tolist()} in layer {layers[layer]}: one twice, or "
                "nothing was recorded. The engine must return the experts of every token that it computed"
            )
        return ""
