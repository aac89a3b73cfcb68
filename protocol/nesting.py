"""Depth of values that come from others, bounded wherever they are decoded: msgpack reads maps 1024 deep, and whatever
walks such a value (validation, JSON, a repr) meets Python's own limit at a depth that depends on its caller.

Workers of environments import this module: it imports no pydantic.
"""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 64
"""Most maps and lists in each other; the columns of a ticket's row count by themselves."""
LONGEST_INFO = 4096
"""Characters of an environment's facts about one turn, as JSON."""

_NESTED = (dict, list, tuple)


class NestingError(ValueError):
    """A value is nested more than MAX_DEPTH deep."""

    def __init__(self) -> None:
        super().__init__(f"it is nested more than {MAX_DEPTH} deep")


def check_depth(value: Any) -> None:
    """Raise NestingError where maps, lists and tuples lie in each other more than MAX_DEPTH deep."""
    level = [value] if isinstance(value, _NESTED) else []
    for _ in range(MAX_DEPTH):
        parts = (each.values() if isinstance(each, dict) else each for each in level)
        level = [inner for part in parts for inner in part if isinstance(inner, _NESTED)]
        if not level:
            return
    raise NestingError


def read_json(text: str | bytes | bytearray, **hooks: Any) -> Any:
    """The value of a JSON text, with the hooks of `json.loads`. Raises ValueError, and nothing else but what these
    raise, for text that is no JSON or is nested more than MAX_DEPTH deep."""
    try:
        value = json.loads(text, **hooks)
    except RecursionError:
        raise NestingError from None
    check_depth(value)
    return value
