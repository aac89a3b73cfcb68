"""Read the filters of a list: the same words on the command line and in the address of the page."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import get_args

from asyncrl.errors import UserError
from asyncrl_plugins.viewer.samples.model import Order, SampleQuery
from protocol.messages import TrajectoryStatus
from protocol.messages.groups import CallErrorKind, Limit

ORDERS: tuple[Order, ...] = get_args(Order)
STATUSES = tuple(str(status) for status in TrajectoryStatus)
FILTERS = ("step", "reward", "status", "staleness", "prompt", "end", "tool", "error", "order")
ENDS = ("done", "cut", *filter(None, get_args(Limit)), "failed")
"""Endings of a trajectory of several turns."""
CALL_ERRORS = get_args(CallErrorKind)[1:]
ANY_ERROR = "any"
LARGEST = 2**62
"""The largest whole number of a filter: SQLite's integers have 64 bits."""
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})(?:-({_NUMBER}))?")
_BOUND = re.compile(rf"(<=|>=|<|>)({_NUMBER})")


def read_query(words: Mapping[str, str]) -> SampleQuery:
    """Build a query from words by the names of FILTERS. Empty words do not filter; UserError names unreadable ones."""
    given = {name: words[name].strip() for name in FILTERS if words.get(name, "").strip()}
    return SampleQuery(
        steps=_whole("step", given["step"]) if "step" in given else None,
        rewards=_range("reward", given["reward"]) if "reward" in given else None,
        statuses=_names("status", "The status of a trajectory", given.get("status", ""), STATUSES),
        staleness=_whole("staleness", given["staleness"]) if "staleness" in given else None,
        prompt=given.get("prompt", ""),
        ends=_names("end", "The end of a trajectory of several turns", given.get("end", ""), ENDS),
        tool=given.get("tool", ""),
        call_errors=_call_errors(given["error"]) if "error" in given else None,
        order=_order(given.get("order", ORDERS[0])),
    )


def _range(name: str, text: str) -> tuple[float, float]:
    """Parse the inclusive ends of `0.5`, `0-0.5`, `-1--0.5`, `<0.5`, `>=0`."""
    text = text.replace(" ", "")
    if match := _RANGE.fullmatch(text):
        low = float(match[1])
        high = float(match[2]) if match[2] is not None else low
        if low > high:
            raise UserError(f"{name} {text} is empty: {low:g} is above {high:g}. Write the lower end first")
        return low, high
    if match := _BOUND.fullmatch(text):
        bound = float(match[2])
        return {
            "<": (-math.inf, math.nextafter(bound, -math.inf)),
            "<=": (-math.inf, bound),
            ">": (math.nextafter(bound, math.inf), math.inf),
            ">=": (bound, math.inf),
        }[match[1]]
    raise UserError(f"{name} cannot be {text!r}. Write one value (3), a range (1-5), or a bound (<3, >=1)")


def _whole(name: str, text: str) -> tuple[int, int]:
    low, high = _range(name, text)
    if low > LARGEST or high < -LARGEST:
        raise UserError(f"{name} {text[:40]} is out of range. Write numbers from -{LARGEST} to {LARGEST}")
    return math.ceil(max(low, -LARGEST)), math.floor(min(high, LARGEST))


def _names(name: str, meaning: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    asked = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    unknown = [word for word in asked if word not in known]
    if unknown:
        raise UserError(f"there is no {name} {unknown[0]!r}. {meaning} is one of {', '.join(known)}")
    return asked


def _call_errors(text: str) -> tuple[str, ...]:
    """Kinds of error; none for any."""
    return () if text == ANY_ERROR else _names("error", "The kind of a call's error", text, CALL_ERRORS)


def _order(text: str) -> Order:
    if text in ORDERS:
        return text
    raise UserError(f"there is no order {text!r}. Samples can be listed {', '.join(ORDERS)} first")
