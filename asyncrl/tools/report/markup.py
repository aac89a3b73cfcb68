"""HTML of a page: its templates, escaped text, and numbers. Templates and `text` escape all text that others wrote."""

from __future__ import annotations

import base64
import hashlib
import re
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from asyncrl.tools.report.recorded_run import number

_FOLDER = Path(__file__).parent
_SHOWN = {"\n", "\t"}
LABELS = {
    "good": "best of its time",
    "bad": "worst of its time",
    "truncated": "truncated",
    "timed_out": "timed out",
    "error": "error",
}
"""Reasons for showing a sample."""
FOLDED_FROM = 420
"""Characters after which a text is folded."""
MAX_CHARACTERS = 8000
NUM_COLOURS = 8


def text(value: Any) -> str:
    """Escape text for elements and quoted attributes."""
    return str(escape(_visible(value)))


def _visible(value: Any) -> Any:
    """Show control characters, and those that change the direction of writing, as their codes."""
    if isinstance(value, Markup):
        return value
    return "".join(c if c.isprintable() or c in _SHOWN else c.encode("unicode_escape").decode() for c in str(value))


def render(template: str, **values: Any) -> str:
    """Fill a template. The page loads nothing from anywhere, and no other script than report.js may run."""
    style, script = ((_FOLDER / name).read_text() for name in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _templates().get_template(template).render(style=style, script=script, digest=digest, **values)


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    environment.globals.update(
        LABELS=LABELS, FOLDED_FROM=FOLDED_FROM, MAX_CHARACTERS=MAX_CHARACTERS, NUM_COLOURS=NUM_COLOURS
    )
    environment.filters.update(
        anchor=lambda title: title.lower().replace(" ", "-"),
        count_of=count,
        figure=figure,
        number=number,
        with_code=lambda words: Markup(re.sub("`([^`]+)`", r"<code>\1</code>", text(words))),
    )
    return environment


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
