"""The key-value cache of a decode batch in memory that stays: a captured step has the addresses of its tensors in it.

Each tensor is [R, H, C, D], for the largest number of sequences and of columns so far. A sequence has a row of it, its
slot. A step computes with a part of the memory, the first rows and columns: to take a larger part moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from asyncrl.config.parts import CACHE_BLOCK, cache_columns
from rollout_server.engines.hf.growing_cache import GrowingCache, GrowingLayer


def rounded_rows(rows: int, most: int) -> int:
    """Rows of a step for so many sequences: powers of two, and from 16 on those between them, too; `most` at most."""
    if rows >= most:
        return rows
    power = 1 << (rows - 1).bit_length()
    between = power * 3 // 4
    return min(between if power > 16 and rows <= between else power, most)


def rounded_columns(columns: int, most: int) -> int:
    """Columns of a step over so many: a multiple of CACHE_BLOCK, about an eighth larger at most, within the `most` that
    there are.

    Masked columns are read, too, and a finer division would be captured more often than the reading costs.
    """
    block = max(CACHE_BLOCK, (1 << (columns // 8).bit_length()) >> 1)
    return min(-(-columns // block) * block, most)


def roomy_columns(columns: int, most: int) -> int:
    """Columns of memory for at least so many: a quarter more, up to the `most` that a run may need."""
    return max(cache_columns(columns), min(cache_columns(columns + columns // 4), most))


class SlotTensor:
    """Memory [R, H, C, D]. All of it is finite: attention multiplies masked values by zero."""

    def __init__(self, like: torch.Tensor):
        """Take over heads, sizes, type and device of [N, H, M, D], but no memory."""
        self.memory = like.new_zeros((0, like.shape[1], 0, like.shape[3]))

    def resize(self, rows: int, columns: int, used: slice, target: int) -> None:
        """Take new memory, with the columns `used` from `target` on."""
        _, heads, _, size = self.memory.shape
        kept = self.memory[:, :, used]
        memory = self.memory.new_zeros((rows, heads, columns, size))
        memory[: len(kept), :, target : target + kept.shape[2]] = kept
        self.memory = memory

    def shift(self, used: slice, target: int) -> None:
        """Move the columns `used` of all rows to begin at `target`."""
        moved = self.memory[:, :, used].clone()
        self.memory[:, :, target : target + moved.shape[2]] = moved

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy the slots [M] `sources` to [M] `targets`."""
        self.memory.index_copy_(0, targets, self.memory.index_select(0, sources))

    def fill(self, slots: torch.Tensor, columns: torch.Tensor, end: int) -> None:
        """Put [M, H, P, D] into [M] slots, with its last column before `end`. All else in them is zero."""
        self.memory.index_fill_(0, slots, 0)
        self.memory[:, :, end - columns.shape[2] : end].index_copy_(0, slots, columns)


@dataclass(frozen=True)
class Part:
    """First rows and columns of the memory, which a step computes with."""

    rows: int
    columns: int
    column: torch.Tensor
    """[] int64 on the device: the column of the step's tokens."""


@dataclass
class Layout:
    """Places of the sequences in the memory of every layer."""

    slots: list[int] = field(default_factory=list)
    """Slot of each sequence."""
    start: int = 0
    """First column in use. Those left of it are masked in every row."""
    width: int = 0
    """Number of columns in use."""
    part: Part | None = None
    """Part that a step computes with now; None outside of steps."""

    @property
    def end(self) -> int:
        return self.start + self.width

    @property
    def used(self) -> slice:
        return slice(self.start, self.end)


class SlotLayer(GrowingLayer):
    """Keys and values of one layer."""

    def __init__(self, layout: Layout, keys: torch.Tensor, values: torch.Tensor):
        """Take over heads, sizes, type and device of keys and values, but no memory."""
        super().__init__()
        self._layout = layout
        self.tensors = (SlotTensor(keys), SlotTensor(values))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [N, H, M, D] behind the others; of a step [R, H, 1, D], at the column that its tensor holds."""
        layout, seen = self._layout, list[torch.Tensor]()
        for tensor, states in zip(self.tensors, (key_states, value_states), strict=True):
            if part := layout.part:
                seen.append(tensor.memory[: part.rows, :, : part.columns])
                seen[-1].index_copy_(2, part.column.view(1), states)
            else:
                rows, grown = len(states), layout.end + states.shape[2]
                tensor.memory[:rows, :, layout.end : grown] = states
                seen.append(tensor.memory[:rows, :, layout.start : grown])
        return seen[0], seen[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        part = self._layout.part
        return part.columns if part else self._layout.width + query_length, 0

    def get_seq_length(self) -> Any:
        """Number of columns before the present tokens; in a step a tensor, which masks are computed from."""
        part = self._layout.part
        return part.column if part else self._layout.width


class SlotCache(GrowingCache):
    """All layers, empty at first; slots and columns mean the same in each."""

    def __init__(self, most_rows: int, most_columns: int, moved: Callable[[], None]):
        """`most_rows` and `most_columns`: what the memory is rounded up to at most. `moved` is called where the memory
        has other addresses."""
        super().__init__()
        self._most_rows, self._most_columns, self._moved = most_rows, most_columns, moved
        self.rows = self.columns = 0
        """Size of the memory."""
        self._layout = Layout()
        self._slot_layers: list[SlotLayer] = []
        self.slots = torch.zeros(0, dtype=torch.long)
        """[N] slot of each sequence, on the device."""

    @property
    def is_compileable(self) -> bool:
        """True in a step: transformers then computes the mask without a look at its values."""
        return self._layout.part is not None

    @property
    def start(self) -> int:
        """First column in use."""
        return self._layout.start

    @property
    def end(self) -> int:
        """Column of the next token."""
        return self._layout.end

    @property
    def step_rows(self) -> int:
        return rounded_rows(len(self._layout.slots), self._most_rows)

    @property
    def step_columns(self) -> int:
        """Columns of a step that adds one."""
        return rounded_columns(self.end + 1, self.columns)

    @contextmanager
    def step(self, rows: int, columns: int, column: torch.Tensor) -> Iterator[None]:
        """Block in which a forward pass is a step over a part of the memory, whichever slots are in use."""
        self._layout.part = Part(rows, columns, column)
        try:
            yield
        finally:
            self._layout.part = None

    def join(self, joining: Any, which: torch.Tensor, width: int) -> None:
        """Add the rows `which` [M] of a prefilled cache, and free that layer by layer: both may not fit."""
        layout = self._layout
        if not self.layers:
            self._slot_layers = [SlotLayer(layout, layer.keys, layer.values) for layer in joining.layers]
            self.layers = [*self._slot_layers]
        shift = width - layout.width
        start = max(layout.start - shift, 0)  # padding of the present rows may have room on the left
        self._place(start + shift, len(layout.slots) + len(which), start + width)
        layout.start, layout.width = start, width
        free = self._free_slots(len(which), self.rows)
        slots = torch.tensor(free, device=which.device)
        for layer, prefilled in zip(self._slot_layers, joining.layers, strict=True):
            keys, values = layer.tensors
            keys.fill(slots, prefilled.keys[which], layout.end)
            values.fill(slots, prefilled.values[which], layout.end)
            prefilled.keys = prefilled.values = None
        self._take(layout.slots + free, which.device)

    @torch.inference_mode()
    def keep(self, rows: torch.Tensor, unused: int) -> None:
        """Drop the other rows, whose slots are free then, and `unused` columns on the left."""
        layout = self._layout
        layout.start, layout.width = layout.start + unused, layout.width - unused
        slots = [layout.slots[row] for row in rows.tolist()]
        layout.slots = slots
        outside = [slot for slot in slots if slot >= self.step_rows]
        if outside:
            inside = self._free_slots(len(outside), self.step_rows)
            sources, targets = torch.tensor([outside, inside], device=rows.device)
            for tensor in self._tensors():
                tensor.move(sources, targets)
            slots = [inside.pop(0) if slot in outside else slot for slot in slots]
        self._take(slots, rows.device)
        if layout.start > layout.width // 4:  # a step reads these columns, too
            self._place(0, 0, layout.width)

    def reorder(self, order: torch.Tensor) -> None:
        """Let [N, W] `order` name the columns of each row. All slots are in their order: rows have only joined."""
        layout, (rows, width) = self._layout, order.shape
        for tensor in self._tensors():
            _, heads, _, size = tensor.memory.shape
            chosen = tensor.memory[:rows, :, layout.used].gather(2, order[:, None, :, None].expand(-1, heads, -1, size))
            tensor.memory[:rows, :, :width] = chosen
        layout.start, layout.width = 0, width

    def reserve(self, tokens: int) -> None:
        """Make room for so many more columns."""
        if self.end + tokens > self.columns:
            self._place(0, 0, self._layout.width + tokens)

    def grow(self, tokens: int) -> None:
        """Count the columns that a forward pass has written."""
        self._layout.width += tokens

    def clear(self) -> None:
        """Free all slots. The memory stays."""
        self._layout.slots, self._layout.start, self._layout.width = [], 0, 0

    def _tensors(self) -> Iterator[SlotTensor]:
        return (tensor for layer in self._slot_layers for tensor in layer.tensors)

    def _free_slots(self, count: int, before: int) -> list[int]:
        """Return the first slots that no sequence has."""
        taken = set(self._layout.slots)
        return [slot for slot in range(before) if slot not in taken][:count]

    def _take(self, slots: list[int], device: torch.device) -> None:
        self._layout.slots, self.slots = slots, torch.tensor(slots, device=device)

    def _place(self, target: int, rows: int, end: int) -> None:
        """Let the columns in use begin at `target`, in memory of `rows` slots and `end` columns at least."""
        layout, used = self._layout, self._layout.used
        layout.start = target
        if rows > self.rows or end > self.columns:
            if rows > self.rows:
                self.rows = rounded_rows(rows, self._most_rows)
            if end > self.columns:
                self.columns = roomy_columns(end, self._most_columns)
            for tensor in self._tensors():
                tensor.resize(self.rows, self.columns, used, target)
            self._moved()
        elif target != used.start and layout.width:
            for tensor in self._tensors():
                tensor.shift(used, target)
