"""A decode batch whose steps have shapes and addresses that stay, so that they can be captured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from asyncrl_plugins.cuda_graphs.graphs import StepGraphs, WrongReplayError
from asyncrl_plugins.cuda_graphs.slots import SlotCache
from rollout_server.engines.hf.decode_batch import DecodeBatch, DecodeRow


class StepTensors:
    """Inputs and result of the steps of a batch, for all slots and columns of its cache."""

    def __init__(self, rows: int, columns: int, device: torch.device):
        self.ids = torch.zeros((rows, 1), dtype=torch.long, device=device)
        self.positions = torch.zeros_like(self.ids)
        self.attention = torch.zeros((rows, columns), dtype=torch.bool, device=device)
        self.column = torch.zeros((), dtype=torch.long, device=device)
        self.logits: torch.Tensor | None = None
        """[R, V], known with the first step."""

    def fill(
        self, cache: SlotCache, shape: tuple[int, int], ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor
    ) -> None:
        """Put [N, 1] tokens and positions and [N, W + 1] attention where the step of this shape reads them."""
        rows, columns = shape
        self.ids[:rows].index_copy_(0, cache.slots, ids)
        self.positions[:rows].index_copy_(0, cache.slots, positions)
        self.column.fill_(cache.end)
        attention = self.attention[:rows, :columns]
        attention.zero_()
        attention[:, cache.end].fill_(True)  # a slot without a sequence attends to this: attention to nothing is NaN
        attention[:, cache.start : cache.end + 1].index_copy_(0, cache.slots, seen.bool())

    def result(self, logits: torch.Tensor) -> torch.Tensor:
        """Copy [R, V] logits of the first rows to where they stay."""
        if self.logits is None:
            self.logits = logits.new_zeros((len(self.ids), logits.shape[1]))
        return self.logits[: len(logits)].copy_(logits)


class GraphedBatch(DecodeBatch):
    """All sequences in flight, whose steps are captured. Prompts and rebuilt caches pass the model as before."""

    def __init__(
        self,
        model: Any,
        banned_token_ids: Sequence[int],
        device: torch.device,
        *,
        most: tuple[int, int],
        graphs: StepGraphs,
    ):
        """`most`: sequences and columns that the memory is rounded up to. `graphs` are this batch's from now on."""
        super().__init__(model, banned_token_ids, device)
        self._graphs = graphs
        self._tensors: StepTensors | None = None
        self._cache = self._slots = SlotCache(*most, moved=self._forget_addresses)
        graphs.drop()

    def step(self, version: int) -> list[DecodeRow]:
        try:
            return super().step(version)
        except WrongReplayError:  # nothing was sampled
            self.rebuild_cache()
            return super().step(version)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        tokens = ids.shape[1]
        self._slots.reserve(tokens)
        pass_on = self._step if tokens == 1 else super()._forward
        logits = pass_on(ids, positions, attention)
        self._slots.grow(tokens)
        return logits

    def _step(self, ids: torch.Tensor, positions: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """[N, 1] tokens and positions, [N, W + 1] attention -> [N, V]"""
        cache = self._slots
        if self._tensors is None:
            self._tensors = StepTensors(cache.rows, cache.columns, self.device)
        shape = cache.step_rows, cache.step_columns
        self._tensors.fill(cache, shape, ids, positions, attention)
        logits = self._graphs.run(shape, partial(self._compute, self._tensors, *shape))
        return logits.index_select(0, cache.slots)

    def _compute(self, tensors: StepTensors, rows: int, columns: int) -> torch.Tensor:
        """Compute the logits [R, V] of the first rows, from the tensors alone."""
        with self._slots.step(rows, columns, tensors.column):
            attention = tensors.attention[:rows, :columns]
            return tensors.result(super()._forward(tensors.ids[:rows], tensors.positions[:rows], attention))

    def _clear(self) -> None:
        self._slots.clear()
        self._attention = self._attention[:0, :0]

    def _forget_addresses(self) -> None:
        self._tensors = None
        self._graphs.drop()
