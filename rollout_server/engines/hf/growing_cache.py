"""The key-value cache of a decode batch. Its memory has room behind the last column: a decode step writes in place.

transformers' DynamicCache joins old and new columns instead, which copies the whole cache for every token.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from asyncrl.config.parts import cache_columns


class GrowingTensor:
    """The first W columns of memory [N, H, C, D].

    They begin where the memory does: heads are aligned as in a tensor of W columns, and attention keeps its bits.
    """

    def __init__(self, columns: torch.Tensor):
        self._memory = self._columns = columns

    def _show(self, width: int) -> torch.Tensor:
        self._columns = self._memory[:, :, :width]
        return self._columns

    def _allocate(self, rows: int, width: int) -> torch.Tensor:
        _, heads, _, size = self._columns.shape
        return self._columns.new_empty((rows, heads, cache_columns(width), size))

    def append(self, columns: torch.Tensor) -> torch.Tensor:
        """Write [N, H, M, D] behind the others, which are copied only where the memory has no room."""
        width = self._columns.shape[2]
        grown = width + columns.shape[2]
        if grown > self._memory.shape[2]:
            self._memory = self._allocate(len(columns), grown)
            self._memory[:, :, :width] = self._columns
        self._memory[:, :, width:grown] = columns
        return self._show(grown)

    def join(self, joining: torch.Tensor, which: torch.Tensor, width: int) -> torch.Tensor:
        """Add the rows `which` [M] of [R, H, P, D]. All rows are padded on the left with zeros to `width` columns."""
        rows = len(self._columns)
        self._memory = self._allocate(rows + len(which), width)
        for part, columns in ((self._memory[:rows], self._columns), (self._memory[rows:], joining[which])):
            start = width - columns.shape[2]
            part[:, :, :start] = 0
            part[:, :, start:width] = columns
        return self._show(width)

    def keep(self, rows: torch.Tensor, unused: int) -> torch.Tensor:
        """Drop the other rows, and `unused` columns on the left."""
        width = self._columns.shape[2] - unused
        self._memory = self._memory[:, :, unused:].index_select(0, rows)
        return self._show(width)

    def reorder(self, order: torch.Tensor) -> torch.Tensor:
        """Let [N, W] `order` name the columns of each row; it may be shorter than they are."""
        _, heads, _, size = self._columns.shape
        chosen = self._columns.gather(2, order[:, None, :, None].expand(-1, heads, -1, size))
        self._memory[:, :, : order.shape[1]] = chosen
        return self._show(order.shape[1])


class GrowingLayer(CacheLayerMixin):
    """Keys and values of one layer.

    Each of its methods is done with the keys, and has freed the memory that they left, before the values need some.
    """

    is_sliding = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take over rows, heads, sizes, type and device of [N, H, M, D], but no columns."""
        self.__keys, self.__values = GrowingTensor(key_states[:, :, :0]), GrowingTensor(value_states[:, :, :0])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self.__keys.append(key_states)
        self.values = self.__values.append(value_states)
        return self.keys, self.values

    def join(self, keys: torch.Tensor, values: torch.Tensor, which: torch.Tensor, width: int) -> None:
        if not self.is_initialized:
            self.lazy_initialization(keys[:0], values[:0])
        self.keys = self.__keys.join(keys, which, width)
        self.values = self.__values.join(values, which, width)

    def keep(self, rows: torch.Tensor, unused: int) -> None:
        self.keys = self.__keys.keep(rows, unused)
        self.values = self.__values.keep(rows, unused)

    def reorder(self, order: torch.Tensor) -> None:
        self.keys = self.__keys.reorder(order)
        self.values = self.__values.reorder(order)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def get_max_length(self) -> int:
        return -1


class GrowingCache(Cache):
    """All layers, empty at first; rows and columns mean the same in each."""

    layers: list[GrowingLayer]

    def __init__(self):
        super().__init__(layer_class_to_replicate=GrowingLayer)

    def join(self, joining: Any, which: torch.Tensor, width: int) -> None:
        """Add the rows `which` [M] of a prefilled cache, and free that layer by layer: both may not fit."""
        self.layers = self.layers or [GrowingLayer() for _ in joining.layers]
        for layer, prefilled in zip(self.layers, joining.layers, strict=True):
            layer.join(prefilled.keys, prefilled.values, which, width)
            prefilled.keys = prefilled.values = None

    def keep(self, rows: torch.Tensor, unused: int) -> None:
        """Drop the other rows, and `unused` columns on the left."""
        for layer in self.layers:
            layer.keep(rows, unused)

    def reorder(self, order: torch.Tensor) -> None:
        """Let [N, W] `order` name the columns of each row."""
        for layer in self.layers:
            layer.reorder(order)
