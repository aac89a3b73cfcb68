"""Field types whose bytes travel as raw ZeroMQ frames beside the MessagePack header.

A message is an ordinary pydantic model. While it is encoded, every array or blob field moves its
bytes into a frame of its own and leaves `{"frame": i, ...}` in the header; while it is decoded, the
field becomes a read-only view of that frame (zero-copy). Nothing here knows about sockets.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Any

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

    def take(self, index: Any) -> memoryview:
        if type(index) is not int or not 1 <= index < len(self.frames):  # a bool is an int to isinstance
            raise PydanticCustomError(
                "frame_missing",
                "frame {index} is named in the header, but the message has {count} frames",
                {"index": reprlib.repr(index), "count": len(self.frames)},
            )
        if index in self.used:
            raise PydanticCustomError("frame_twice", "frame {index} is used twice", {"index": index})
        self.used.add(index)
        return self.frames[index]


def _decoded_array(dtype: str, ndim: int = 1) -> BeforeValidator:
    def decode(value: Any, info: ValidationInfo) -> np.ndarray:
        if isinstance(info.context, FrameSource):
            return _array_from_frame(value, info.context, dtype, ndim)
        array = np.asarray(value, dtype) if isinstance(value, list) else value  # a convenience for tests and examples
        if not isinstance(array, np.ndarray) or array.dtype.str != dtype or array.ndim != ndim:
            raise _no_array(dtype, ndim, array)
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


def _array_from_frame(header: Any, source: FrameSource, dtype: str, ndim: int) -> np.ndarray:
    shape = header.get("shape") if isinstance(header, dict) and header.get("dtype") == dtype else None
    if type(shape) is not list or len(shape) != ndim or not all(type(n) is int and 0 <= n < 2**40 for n in shape):
        raise _no_array(dtype, ndim, header)
    frame = source.take(header.get("frame"))
    needed = prod(shape) * int(dtype[-1])
    if needed != frame.nbytes:
        raise PydanticCustomError(
            "array_size",
            "a frame has {nbytes} bytes, but {dtype}{shape} needs {needed}",
            {"nbytes": frame.nbytes, "dtype": dtype, "shape": shape, "needed": needed},
        )
    return np.frombuffer(frame, dtype).reshape(shape)


def _no_array(dtype: str, ndim: int, got: Any) -> PydanticCustomError:
    what = "expected {dtype} with {ndim} dimension(s) in a frame of its own, got {got}"
    return PydanticCustomError("array_type", what, {"dtype": dtype, "ndim": ndim, "got": reprlib.repr(got)})


def _decode_blob(value: Any, info: ValidationInfo) -> memoryview:
    if isinstance(info.context, FrameSource):
        return info.context.take(value.get("frame") if isinstance(value, dict) else None)
    if isinstance(value, bytes | bytearray | memoryview):
        return memoryview(value)
    raise PydanticCustomError("blob", "expected raw bytes", {})


def _encode_blob(blob: memoryview, info: SerializationInfo) -> Any:
    if not isinstance(info.context, FrameSink):
        return f"<{blob.nbytes} bytes>"
    return {"frame": info.context.add(blob.cast("B") if blob.nbytes else memoryview(b""))}


Int32Array = Annotated[np.ndarray, _decoded_array("<i4"), _encoded_array("<i4")]
"""[N] little-endian int32, one raw frame."""
Int32Matrix = Annotated[np.ndarray, _decoded_array("<i4", ndim=2), _encoded_array("<i4")]
"""[N, M] little-endian int32, one raw frame."""
Float32Array = Annotated[np.ndarray, _decoded_array("<f4"), _encoded_array("<f4")]
"""[N] little-endian float32, one raw frame."""
UInt8Matrix = Annotated[np.ndarray, _decoded_array("|u1", ndim=2), _encoded_array("|u1")]
"""[N, M] uint8, one raw frame."""
UInt8Array = Annotated[np.ndarray, _decoded_array("|u1"), _encoded_array("|u1")]
"""[N] uint8, one raw frame."""
Blob = Annotated[memoryview, BeforeValidator(_decode_blob), PlainSerializer(_encode_blob)]
"""Opaque bytes (an encoded image, a piece of a weight file), one raw frame."""
