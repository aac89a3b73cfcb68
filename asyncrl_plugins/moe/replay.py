"""Experts that the engine chose, chosen again in the learner (R3, arXiv 2510.11370).

The weights of the chosen experts are those of the learner's own router, through which the gradient flows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from asyncrl.errors import BadStateError, UserError
from asyncrl_plugins.moe.routers import routers, watch
from asyncrl_plugins.moe.settings import RoutingReplayConfig
from asyncrl_plugins.moe.shape import ExpertShape


class RoutingReplay:
    """Token trace: experts of each layer that computed a token."""

    def __init__(self, settings: RoutingReplayConfig, described: Mapping[str, Any]):
        shape = ExpertShape.of(described)
        if shape is None:
            raise UserError("algorithm.routing_replay is chosen, and config.json names no experts. Leave it out")
        self._shape = shape
        self.width = shape.width
        self._layers: list[int] = []
        """Layers with experts."""
        self._taken: torch.Tensor | None = None
        """[L, layers, chosen] int64 of the pass that is computed; None: each router chooses for itself."""

    def problem(self, rows: np.ndarray) -> str:
        return self._shape.problem(rows, self._layers)

    def record(self, model: Any) -> Any:
        """Watch the routers of the engine's model."""
        shape, last = self._shape, dict[int, torch.Tensor]()

        def keep(layer: int, _scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            last[layer] = numbers
            return numbers

        for layer, router in routers(model, shape).items():
            watch(router, shape, partial(keep, layer))

        def recorded() -> torch.Tensor:
            """[T, width] uint8 of the last forward pass."""
            tokens = len(next(iter(last.values())))
            dtype = torch.uint8 if shape.dtype == "<u1" else torch.int16
            found = next(iter(last.values())).new_zeros((tokens, shape.layers, shape.chosen), dtype=dtype)
            for layer, numbers in last.items():
                found[:, layer] = numbers.to(dtype)
            return found.view(tokens, -1).view(torch.uint8)

        return recorded

    def replay(self, model: Any) -> Any:
        """Watch the routers of the learner's model. Layers that the backward pass computes again take the experts of
        their first pass, whatever was computed in between."""

        def choose(place: int, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            if self._taken is None:
                return numbers
            if len(self._taken) != len(scores):
                raise BadStateError(f"experts of {len(self._taken)} tokens for a pass over {len(scores)}")
            return self._taken[:, place]

        found = routers(model, self._shape)
        self._layers = list(found)
        for layer, router in found.items():
            watch(router, self._shape, partial(choose, layer))
        if model.is_gradient_checkpointing:

            def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
                return nullcontext(), self._taking(self._taken)

            again = partial(checkpoint, use_reentrant=False, context_fn=contexts)
            for layer in model.modules():
                if getattr(layer, "gradient_checkpointing", False):
                    layer._gradient_checkpointing_func = again

        def taking(rows: torch.Tensor) -> AbstractContextManager[None]:
            if self._shape.dtype == "<u2":
                rows = rows.contiguous().view(torch.int16)
            return self._taking(rows.view(len(rows), self._shape.layers, self._shape.chosen).long() % 2**16)

        return taking

    @contextmanager
    def _taking(self, taken: torch.Tensor | None) -> Iterator[None]:
        before, self._taken = self._taken, taken
        try:
            yield
        finally:
            self._taken = before
