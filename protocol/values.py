"""Values of dataset columns, packed: MessagePack with typed extensions for what it has no type for.

| Python | travels as | arrives as |
|---|---|---|
| None, bool, int, float, str, bytes, list, dict | themselves | themselves, keys of a dict included |
| datetime, date, time | ISO 8601 | themselves; a time zone as its offset from UTC |
| timedelta, Decimal, UUID | text | themselves |
| int beyond 64 bits | its bytes | int |
| tuple | list | list |
| a number of NumPy | int or float | int or float |

Everything else is refused by the sender. Reward workers import this module: it imports no pydantic.
"""

from __future__ import annotations

import base64
import numbers
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgpack

from protocol.nesting import check_depth

MAX_ELEMENTS = 1 << 16
"""Most elements of one list or map; longer columns of ours belong in frames."""
_INTEGER = 1
_MICROSECOND = timedelta(microseconds=1)
_TEXTS: dict[int, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    2: (datetime, datetime.isoformat, datetime.fromisoformat),  # before date, of which it is a subclass
    3: (date, date.isoformat, date.fromisoformat),
    4: (time, time.isoformat, time.fromisoformat),
    5: (timedelta, lambda value: str(value // _MICROSECOND), lambda text: timedelta(microseconds=int(text))),
    6: (Decimal, str, Decimal),
    7: (UUID, str, UUID),
}
"""Extension code -> type, its text, and its value of such a text."""


def pack_values(value: Any) -> bytes:
    """Raises TypeError, ValueError or OverflowError for what cannot travel."""
    check_depth(value)
    packed = msgpack.packb(value, default=as_extension)
    assert packed is not None  # None only from a Packer with autoreset off
    return packed


def unpack_values(packed: Any) -> Any:
    """The value of `pack_values`. Raises ValueError for anything else."""
    if not isinstance(packed, bytes):
        raise ValueError(f"expected packed values, got {type(packed).__name__}")
    try:
        value = msgpack.unpackb(
            packed,
            ext_hook=of_extension,
            strict_map_key=False,
            max_array_len=MAX_ELEMENTS,
            max_map_len=MAX_ELEMENTS,
        )
        check_depth(value)
    except (ValueError, TypeError, msgpack.UnpackException) as problem:  # TypeError: a list as a key
        raise ValueError(f"no packed values: {problem or type(problem).__name__}") from problem
    return value


def as_extension(value: Any) -> Any:
    """`default` of a MessagePack packer. Raises TypeError, which names the type of a value that cannot travel."""
    if isinstance(value, numbers.Integral):  # NumPy's, or beyond 64 bits
        number = int(value)
        if -(2**63) <= number < 2**64:
            return number
        return msgpack.ExtType(_INTEGER, number.to_bytes(number.bit_length() // 8 + 1, "big", signed=True))
    if isinstance(value, numbers.Real):  # NumPy's
        return float(value)
    for code, (kind, text, _) in _TEXTS.items():
        if isinstance(value, kind):
            if getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):  # of pandas
                raise TypeError(f"a {type(value).__name__} with nanoseconds")
            return msgpack.ExtType(code, text(value).encode())
    raise TypeError(f"a {type(value).__name__}")


def of_extension(code: int, data: bytes) -> Any:
    """`ext_hook` of an unpacker. Raises ValueError."""
    if code == _INTEGER:
        return int.from_bytes(data, "big", signed=True)
    if code not in _TEXTS:
        raise ValueError(f"extension type {code} is not allowed")
    kind, _, value = _TEXTS[code]
    try:
        return value(bytes(data).decode())
    except (ValueError, ArithmeticError) as problem:
        raise ValueError(f"{bytes(data[:50])!r} is no {kind.__name__}") from problem


def as_json(value: Any) -> Any:
    """The value for readers of JSON: bytes as base64, other types as their texts, also as keys."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(as_json(key)): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, numbers.Real | str) or value is None:
        return value
    return next((text(value) for kind, text, _ in _TEXTS.values() if isinstance(value, kind)), str(value))
