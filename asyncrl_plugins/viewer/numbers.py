"""Numbers in text for people: figures, shares, durations, moments and counts."""

from __future__ import annotations

import re
from datetime import datetime


def figure(value: float | None) -> str:
    """Format a number with about four digits: 0.9312, 12.4, 13,200, 4.6 M, 2.1e-5."""
    if value is None:
        return "-"
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3:
        return re.sub(r"e-0", "e-", f"{value:.2g}")
    if size >= 1e15:
        return f"{value:.2e}"
    for unit, name in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
        if size >= unit:
            return f"{value / unit:.3g}{name}"
    if size >= 1000:
        return f"{value:,.0f}"
    if value == int(value):
        return f"{value:.0f}"
    return f"{value:.4f}".rstrip("0") if size < 1 else f"{value:.4g}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}" if abs(value) >= 0.0995 or value == 0 else f"{value:.1%}"


def duration(seconds: float | None) -> str:
    """Format seconds: 7.5 ms, 3.2 s, 4 min 05 s, 2 h 13 min, 3 d 04 h."""
    if seconds is None:
        return "-"
    if 0 < seconds < 0.1:
        return f"{seconds * 1000:.2g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"


def moment(at: float | None) -> str:
    """Format Unix seconds as local time with its offset."""
    try:
        return "-" if at is None else datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    except (ValueError, OverflowError, OSError):
        return "-"


def count(number: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun: `1 step`, `2 steps`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
