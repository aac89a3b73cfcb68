"""Layers with a state (recurrences, convolutions) in packed groups: each row passes them from its beginning.

Such a layer knows no layout, but it is causal: behind a copy of its prompt each completion has the states that it has
alone, whatever kernel computes them. All other layers stay packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from asyncrl.attention.prefix_kernels import Group, similar


class RowBatches:
    """Completions of packed groups behind copies of their prompts.

    Those of similar length are padded to one at their end, where a causal token does not see the padding.
    """

    def __init__(self, groups: Sequence[Group], device: torch.device):
        first, prompt, start, length = separate_rows(groups)
        lengths = prompt + length
        self._shapes: list[tuple[int, int]] = []
        gathers: list[np.ndarray] = []
        places = np.empty(sum(prompt + sum(completions) for prompt, completions in groups), np.int64)
        padded = 0
        for chosen in similar(lengths.tolist()):
            rows, column = np.asarray(chosen)[:, None], np.arange(lengths[chosen].max())
            behind = column - prompt[rows]
            source = np.where(behind < 0, first[rows] + column, start[rows] + behind)
            is_real = column < lengths[rows]
            gathers.append(np.where(is_real, source, first[rows]).ravel())
            places[source[is_real]] = padded + np.flatnonzero(is_real)  # a prompt's output is that of any copy
            padded += is_real.size
            self._shapes.append((len(chosen), len(column)))
        self._gather = torch.from_numpy(np.concatenate(gathers)).to(device)
        self._places = torch.from_numpy(places).to(device)

    def apart(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """[T, ...] -> [rows, longest, ...] of each batch."""
        parts = packed.index_select(0, self._gather).split([rows * length for rows, length in self._shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def packed(self, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """[rows, longest, ...] of each batch -> [T, ...]"""
        return torch.cat([batch.flatten(0, 1) for batch in batches]).index_select(0, self._places)


def separate_rows(groups: Sequence[Group]) -> np.ndarray:
    """[4, rows]: of each completion where its prompt is in the packed sequence and how long, and where it is itself and
    how long; of length 0 for a prompt alone, where it has none."""
    rows: list[tuple[int, int, int, int]] = []
    start = 0
    for prompt, completions in groups:
        end = start + prompt
        for completion in completions:
            if completion:
                rows.append((start, prompt, end, completion))
            end += completion
        if end == start + prompt:
            rows.append((start, prompt, end, 0))
        start = end
    return np.asarray(rows, np.int64).reshape(-1, 4).T


def stateful_parts(layer: nn.Module) -> list[nn.Module]:
    """Parts of it with a state: they compute several times in one pass, on each rank as often as it has batches."""
    return [part for part in layer.children() if any(isinstance(each, nn.Conv1d) for each in part.children())]


def hand_on_layout(model: Any) -> None:
    """Let the layout reach layers with a causal convolution, as all recurrences of today have, and the attention of
    StableLM, whose layers (transformers 5.19) keep such arguments to themselves.

    The check of a family at the start finds what this does not reach.
    """
    for layer in model.modules():
        given: dict[str, Any] = {}
        stateful = stateful_parts(layer)
        for part in stateful:
            part.forward = _row_by_row(part.forward, given)
        if type(layer).__name__ == "StableLmDecoderLayer":

            def add(_: Any, values: Any, arguments: dict[str, Any], given: dict[str, Any] = given) -> Any:
                return values, {**arguments, **given}

            layer.self_attn.register_forward_pre_hook(add, with_kwargs=True)
        elif not stateful:
            continue

        def keep(_: Any, __: Any, arguments: dict[str, Any], given: dict[str, Any] = given) -> None:
            given["shared_prefix"] = arguments.get("shared_prefix")

        layer.register_forward_pre_hook(keep, with_kwargs=True)


def _row_by_row(forward: Callable[..., Any], given: dict[str, Any]) -> Callable[..., Any]:
    """`forward` of a layer with a state, hidden states [1, T, D] first; it computes each row of the layout in `given`
    alone, and all as one where there is none."""

    def computed(*values: Any, **arguments: Any) -> Any:
        layout = given.get("shared_prefix")
        if layout is None:
            return forward(*values, **arguments)
        arguments.pop("shared_prefix", None)
        hidden, *others = values or [arguments.pop("hidden_states")]
        found = [forward(batch, *others, **arguments) for batch in layout.rows.apart(hidden[0])]
        if isinstance(found[0], tuple):
            return layout.rows.packed([batch for batch, *_ in found])[None], *found[0][1:]
        return layout.rows.packed(found)[None]

    return computed
