"""Encoding of messages into ZeroMQ frames, and decoding.

Frame 0 is a MessagePack map, the *header*: the message's fields, told apart by `type`. Arrays and blobs
follow as raw frames, in the order in which the header names them. Decoding copies no array and no blob.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, TypeAlias, cast, get_args

import msgpack
import zmq
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from protocol.errors import ErrorCode, ProtocolError
from protocol.frames import FrameSink, FrameSource
from protocol.messages import Message, Wire, printable
from protocol.nesting import MAX_DEPTH, NestingError, check_depth
from protocol.values import MAX_ELEMENTS

MIB = 1 << 20
MAX_REASON = 500
"""Characters of a reason that travels back to the peer."""
REPORTED_ERRORS = 3

Frame: TypeAlias = bytes | memoryview | zmq.Frame
Expected: TypeAlias = type[Wire] | UnionType | tuple[type[Wire], ...]


@dataclass(frozen=True)
class Limits:
    """Largest message. Both sides use the same numbers, so a sender finds out first."""

    max_message_bytes: int = 256 * MIB
    max_header_bytes: int = 8 * MIB
    max_frames: int = 4096


def encode(message: Wire, limits: Limits | None = None) -> list[bytes | memoryview]:
    """The frames of `message`. Frames after the first are views of its arrays: send before changing those.

    Raises ProtocolError: TOO_LARGE beyond `limits`, MALFORMED when a free-form field (a dataset column) holds
    something that MessagePack does not know.
    """
    sink = FrameSink()
    try:
        fields = message.model_dump(context=sink)
        check_depth(fields)
        header = cast(bytes, msgpack.packb(fields))
    except (TypeError, ValueError, OverflowError, PydanticSerializationError) as problem:
        raise ProtocolError(
            ErrorCode.MALFORMED,
            _shorten(
                f"{type(message).__name__} holds a value that cannot travel: {problem}. "
                f"Use text, numbers, booleans, bytes, dates, decimals, lists and maps, at most {MAX_DEPTH} deep"
            ),
        ) from problem
    if limits is not None:
        _check_sizes([memoryview(header), *sink], limits, type(message).__name__)
    return [header, *sink]


def decode(frames: Sequence[Frame], expected: Expected, limits: Limits) -> Message:
    """The message in `frames`, if it is one of `expected` (a model, a union of models, or several models).

    Arrays and blobs are read-only views of the frames. Raises ProtocolError and nothing else.
    """
    header = read_header(frames, limits)
    name = header.get("type")
    if not isinstance(name, str):
        raise ProtocolError(ErrorCode.MALFORMED, "the header has no `type`")
    model = models_by_type(expected).get(name)
    if model is None:
        known = ALL_MODELS.get(name)
        if known is None:
            raise ProtocolError(ErrorCode.UNKNOWN_TYPE, f"unknown message type {name[:100]!r}")
        accepted = ", ".join(sorted(models_by_type(expected)))
        raise ProtocolError(ErrorCode.WRONG_DIRECTION, f"`{name}` is not for this endpoint, which receives {accepted}")
    source = FrameSource([_view(frame) for frame in frames])
    try:
        message = model.model_validate(header, context=source)
    except ValidationError as problem:
        raise ProtocolError(ErrorCode.MALFORMED, _reason(name, problem)) from problem
    except Exception as problem:  # of a validator: no message of a stranger may end the thread that reads it
        reason = f"{name} cannot be validated: {type(problem).__name__}: {problem}"
        raise ProtocolError(ErrorCode.MALFORMED, _shorten(reason)) from problem
    unused = len(frames) - 1 - len(source.used)
    if unused:
        raise ProtocolError(
            ErrorCode.MALFORMED,
            f"{name}: {unused} of {len(frames) - 1} data frames are named nowhere in the header",
        )
    return cast(Message, message)


def read_header(frames: Sequence[Frame], limits: Limits) -> dict[str, Any]:
    """The unvalidated header, or ProtocolError MALFORMED or TOO_LARGE."""
    if not frames:
        raise ProtocolError(ErrorCode.MALFORMED, "a message without frames")
    views = [_view(frame) for frame in frames]
    _check_sizes(views, limits, "message")
    try:
        header = msgpack.unpackb(
            views[0],
            raw=False,
            strict_map_key=True,
            ext_hook=_refuse_extension,
            max_ext_len=0,
            max_array_len=MAX_ELEMENTS,
            max_map_len=MAX_ELEMENTS,
        )
        check_depth(header)
    except (msgpack.StackError, NestingError) as problem:
        raise ProtocolError(ErrorCode.MALFORMED, f"the header is nested more than {MAX_DEPTH} deep") from problem
    except (ValueError, TypeError, msgpack.UnpackException) as problem:
        reason = f"the header is not MessagePack: {problem or type(problem).__name__}"
        raise ProtocolError(ErrorCode.MALFORMED, _shorten(reason)) from problem
    if not isinstance(header, dict):
        raise ProtocolError(ErrorCode.MALFORMED, f"the header is a {type(header).__name__}, expected a map")
    return header


@lru_cache(maxsize=64)
def models_by_type(expected: Expected) -> dict[str, type[Wire]]:
    """Models of a union (or several models) by their `type` tag."""
    models = expected if isinstance(expected, tuple) else get_args(expected) or (cast(type[Wire], expected),)
    return {model.model_fields["type"].default: model for model in models}


ALL_MODELS: dict[str, type[Wire]] = models_by_type(Message)


def _check_sizes(frames: list[memoryview], limits: Limits, what: str) -> None:
    for name, value, limit in (
        ("frames", len(frames), limits.max_frames),
        ("header bytes", frames[0].nbytes, limits.max_header_bytes),
        ("bytes", sum(frame.nbytes for frame in frames), limits.max_message_bytes),
    ):
        if value > limit:
            raise ProtocolError(ErrorCode.TOO_LARGE, f"{what} has {value:,} {name}, the limit is {limit:,}")


def _view(frame: Frame) -> memoryview:
    return (frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)).toreadonly()


def _refuse_extension(code: int, _data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not allowed")


def _reason(name: str, problem: ValidationError) -> str:
    errors = problem.errors(include_url=False, include_context=False, include_input=False)
    parts = [f"{'.'.join([name, *map(str, e['loc'])])[:120]}: {e['msg']}" for e in errors[:REPORTED_ERRORS]]
    if len(errors) > REPORTED_ERRORS:
        parts.append(f"and {len(errors) - REPORTED_ERRORS} more")
    return _shorten("; ".join(parts))


def _shorten(text: str) -> str:
    """Cut to one line of at most MAX_REASON characters; the peer's own words may be in it."""
    return printable(text, MAX_REASON)
