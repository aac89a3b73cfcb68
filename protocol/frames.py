"""Field types whose bytes travel as raw ZeroMQ frames beside the MessagePack header.

A message is an ordinary pydantic model. While it is encoded, every array or blob field moves its
bytes into a frame of its own and leaves `{"frame": i, ...}` in the header; while it is decoded, the
field becomes a read-only view of that frame (zero-copy). Nothing here knows about sockets.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Any, TypeGuard

import numpy as np
from pydantic import BeforeValidator, PlainSerializer, SerializationInfo, ValidationInfo
from pydantic_core import PydanticCustomError


class FrameSink(list[memoryview]):
    """Frames of one message while it is being encoded."""

    def add(self, data: memoryview) -> int:
        self.append(data)
        return len(self)  # frame 0 is the header itself


@dataclass
class FrameSource:
    """The frames of one received message; frame 0 is the header."""

    frames: list[memoryview]
    used: set[int] = field(default_factory=set)

    def take(self, index: int) -> memoryview:
        if not 1 <= index < len(self.frames):
            raise PydanticCustomError(
                "frame_missing",
                "frame {index} is named in the header, but the message has {count} frames",
                {"index": index, "count": len(self.frames)},
            )
        if index in self.used:
            raise PydanticCustomError("frame_twice", "frame {index} is used twice", {"index": index})
        self.used.add(index)
        return self.frames[index]


def _decoded_array(dtype: str, ndim: int = 1) -> BeforeValidator:
    expected = np.dtype(dtype)

    def decode(value: Any, info: ValidationInfo) -> np.ndarray:
        context = info.context
        if isinstance(value, dict) and isinstance(context, FrameSource):
            array = _array_from_frame(value, context)
        elif isinstance(value, np.ndarray):
            array = value
        elif isinstance(value, list) and not isinstance(context, FrameSource):
            # A convenience for tests and examples; refused from the wire.
            array = np.asarray(value, dtype=expected)
        else:
            raise PydanticCustomError("array_type", "expected an array of {dtype}", {"dtype": dtype})
        if array.dtype != expected or array.ndim != ndim:
            raise PydanticCustomError(
                "array_type",
                "expected {dtype} with {ndim} dimension(s), got {got_dtype} with {got_ndim}",
                {"dtype": dtype, "ndim": ndim, "got_dtype": str(array.dtype), "got_ndim": array.ndim},
            )
        return array

    return BeforeValidator(decode)


def _encoded_array(dtype: str) -> PlainSerializer:
    def encode(array: np.ndarray, info: SerializationInfo) -> Any:
        if not isinstance(info.context, FrameSink):
            return array.tolist()
        contiguous = np.ascontiguousarray(array)
        # An empty buffer cannot be cast, and ZeroMQ carries empty frames well.
        data = contiguous.data.cast("B") if contiguous.size else memoryview(b"")
        return {"frame": info.context.add(data), "dtype": dtype, "shape": list(array.shape)}

    return PlainSerializer(encode)


def _array_from_frame(value: dict[str, Any], source: FrameSource) -> np.ndarray:
    index, dtype, shape = value.get("frame"), value.get("dtype"), value.get("shape")
    itemsize = ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
    if type(index) is not int or itemsize is None or not _is_shape(shape):  # a bool is an int to isinstance
        raise PydanticCustomError("array_header", "not an array header: {got}", {"got": reprlib.repr(value)})
    frame = source.take(index)
    needed = (shape[0] if len(shape) == 1 else prod(shape)) * itemsize
    if needed != frame.nbytes:
        raise PydanticCustomError(
            "array_size",
            "frame {index} has {nbytes} bytes, but {dtype}{shape} needs {needed}",
            {"index": index, "nbytes": frame.nbytes, "dtype": dtype, "shape": shape, "needed": needed},
        )
    array = np.frombuffer(frame, dtype=dtype)
    return array if len(shape) == 1 else array.reshape(shape)


def _is_shape(shape: Any) -> TypeGuard[list[int]]:
    if type(shape) is not list or len(shape) > MAX_DIMENSIONS:
        return False
    if len(shape) == 1:  # nearly every array
        return type(shape[0]) is int and 0 <= shape[0] < 2**40
    return all([type(size) is int and 0 <= size < 2**40 for size in shape])  # noqa: C419  # cheaper than a generator


def _decode_blob(value: Any, info: ValidationInfo) -> memoryview:
    if isinstance(info.context, FrameSource):
        index = value.get("frame") if isinstance(value, dict) else None
        if type(index) is int:
            return info.context.take(index)
    elif isinstance(value, bytes | bytearray | memoryview):
        return memoryview(value)
    raise PydanticCustomError("blob", "expected raw bytes in a frame of their own", {})


def _encode_blob(blob: memoryview, info: SerializationInfo) -> Any:
    if not isinstance(info.context, FrameSink):
        return f"<{blob.nbytes} bytes>"
    return {"frame": info.context.add(blob.cast("B") if blob.nbytes else memoryview(b""))}


MAX_DIMENSIONS = 4
ITEM_BYTES = {"<i4": 4, "<i8": 8, "<f4": 4, "|u1": 1}
"""Item sizes of the data types that may travel."""

Int32Array = Annotated[np.ndarray, _decoded_array("<i4"), _encoded_array("<i4")]
"""[N] little-endian int32, one raw frame."""
Int32Matrix = Annotated[np.ndarray, _decoded_array("<i4", ndim=2), _encoded_array("<i4")]
"""[N, M] little-endian int32, one raw frame."""
Float32Array = Annotated[np.ndarray, _decoded_array("<f4"), _encoded_array("<f4")]
"""[N] little-endian float32, one raw frame."""
UInt8Array = Annotated[np.ndarray, _decoded_array("|u1"), _encoded_array("|u1")]
"""[N] uint8, one raw frame."""
Blob = Annotated[memoryview, BeforeValidator(_decode_blob), PlainSerializer(_encode_blob)]
"""Opaque bytes (an encoded image, a piece of a weight file), one raw frame."""
