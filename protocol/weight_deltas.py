"""The difference of two versions of a publication, chunk by chunk: what a server that has the one needs of the other.

A difference is old XOR new, with the bytes of each element in planes of their own, in one zstd frame. Consecutive
versions of bfloat16 weights differ in few elements and in their low bits, so that it is 4 to 150 times smaller than the
new bytes (docs/lab-log/transport.md, Differences of versions). The result is compared with the checksum of the
new tensor.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import WeightManifest
from protocol.weight_file import ITEMSIZE

if TYPE_CHECKING:
    import pyarrow

LEVEL = 1
"""Level of zstd: level 3 makes bfloat16 differences 0.5 % smaller in 1.2 times the time."""
MOST_SHARE = 0.5
"""A difference that is larger than this share of the new bytes is sent as those. It also bounds what keeping all
differences of a version costs."""


def element_bytes(old: WeightManifest, new: WeightManifest) -> int:
    """Bytes of an element of most of the weights, by which bytes are sorted into planes; 0 where the versions have no
    difference, because they are different publications' or have other tensors."""
    if old.publication != new.publication or _layout(old) != _layout(new):
        return 0
    sizes: Counter[int] = Counter()
    for entry in new.tensors:
        sizes[ITEMSIZE[entry.dtype]] += entry.nbytes
    return sizes.most_common(1)[0][0]


def pack(old: memoryview, new: memoryview, width: int) -> bytes | None:
    """The difference of equally many bytes, for elements of `width` bytes; None where it is not worth its while."""
    difference = np.frombuffer(old, np.uint8) ^ np.frombuffer(new, np.uint8)
    packed = _codec().compress(_planes(difference, width), asbytes=True)
    return packed if len(packed) <= MOST_SHARE * new.nbytes else None


def unpack(packed: memoryview, old: memoryview, into: memoryview, width: int) -> None:
    """Put the new bytes into `into`, which is as long as `old`: nothing longer is ever decompressed.

    Raises ProtocolError MALFORMED for what is not a difference of so many bytes.
    """
    limit = int(MOST_SHARE * into.nbytes)
    if packed.nbytes > limit:
        raise ProtocolError(
            ErrorCode.MALFORMED, f"a difference of {packed.nbytes:,} bytes for {into.nbytes:,}, the limit is {limit:,}"
        )
    try:
        planes = _codec().decompress(packed, decompressed_size=into.nbytes)
    except (OSError, ValueError) as problem:  # pyarrow's, also where it decompresses to more or less
        reason = f"not a zstd frame of {into.nbytes:,} bytes: {problem}"
        raise ProtocolError(ErrorCode.MALFORMED, reason) from problem
    difference = _elements(np.frombuffer(planes, np.uint8), width)
    np.bitwise_xor(np.frombuffer(old, np.uint8), difference, out=np.frombuffer(into, np.uint8))


def _layout(manifest: WeightManifest) -> list[tuple[str, str, tuple[int, ...], int]]:
    return [(entry.name, entry.dtype, entry.shape, entry.offset) for entry in manifest.tensors]


def _planes(data: np.ndarray, width: int) -> np.ndarray:
    """[N] bytes sorted by their place in an element, the lowest first: [width, N / width]."""
    if width == 1 or data.size % width:
        return data
    # Ten times as fast as a transposition; published bytes are little-endian.
    elements = data.view(f"<u{width}")
    planes = np.empty((width, elements.size), np.uint8)
    for place in range(width):
        np.copyto(planes[place], elements >> (8 * place), casting="unsafe")
    return planes


def _elements(data: np.ndarray, width: int) -> np.ndarray:
    """The inverse of `_planes`, as [N] bytes."""
    if width == 1 or data.size % width:
        return data
    planes = data.reshape(width, -1)
    elements = planes[width - 1].astype(f"<u{width}")
    for place in reversed(range(width - 1)):
        elements <<= 8
        elements |= planes[place]
    return elements.view(np.uint8)


@cache
def _codec() -> pyarrow.Codec:
    """zstd of pyarrow, which lets other threads run meanwhile; loaded by those who use it."""
    import pyarrow

    return pyarrow.Codec("zstd", compression_level=LEVEL)
