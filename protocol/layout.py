"""Where each tensor lies in a publication: sizes of dtypes, and offsets aligned to 64 bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

ALIGNMENT = 64
"""Bytes; a cache line, and more than any dtype needs."""

ITEMSIZE: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by torch name without the prefix."""


class PublicationError(Exception):
    """Weights that cannot be published or mapped; the message is for the user."""


@dataclass(frozen=True)
class Slot:
    """The place of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    slots: tuple[Slot, ...]
    total_bytes: int
    """End of the last tensor."""


def plan_layout(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> Layout:
    """Place `(name, dtype, shape, nbytes)` one after another. Raises PublicationError for what cannot be."""
    slots: list[Slot] = []
    names: set[str] = set()
    end = 0
    for name, dtype, shape, nbytes in tensors:
        if name in names:
            raise PublicationError(f"tensor {name!r} is listed twice")
        names.add(name)
        if dtype not in ITEMSIZE:
            raise PublicationError(f"tensor {name!r} has dtype {dtype!r}; known are {', '.join(ITEMSIZE)}")
        if any(n < 0 for n in shape) or math.prod(shape) * ITEMSIZE[dtype] != nbytes:
            raise PublicationError(f"tensor {name!r}: {dtype}{list(shape)} does not have {nbytes} bytes")
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        slots.append(Slot(name, dtype, tuple(shape), offset, nbytes))
        end = offset + nbytes
    if end == 0:
        raise PublicationError("there is nothing to publish: no tensor has any element")
    return Layout(tuple(slots), end)
