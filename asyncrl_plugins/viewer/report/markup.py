"""HTML of a page: its templates and escaped text. Templates and `text` escape all text that others wrote."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from asyncrl_plugins.viewer.numbers import count, figure
from asyncrl_plugins.viewer.recorded_run.run import number

_FOLDER = Path(__file__).parent
_SHOWN = {"\n", "\t"}
LABELS = {
    "good": "best of its time",
    "bad": "worst of its time",
    "alike": "one of many with this reward",
    "truncated": "truncated",
    "timed_out": "timed out",
    "error": "error",
    "call_error": "wrong call",
}
"""Reasons for showing a sample."""
FOLDED_FROM = 420
"""Characters after which a text is folded."""
MAX_CHARACTERS = 8000
NUM_COLOURS = 8


def _visible(value: Any) -> Any:
    """Show control characters, and those that change the direction of writing, as their codes."""
    if isinstance(value, Markup):
        return value
    return "".join(c if c.isprintable() or c in _SHOWN else c.encode("unicode_escape").decode() for c in str(value))


def render(template: str, **values: Any) -> str:
    """Fill a template. The page loads nothing from anywhere, and no other script than report.js may run."""
    style, script = ((_FOLDER / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
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
        anchor=lambda title: title.lower().replace(" ", "-").replace("'", ""),
        count_of=count,
        figure=figure,
        number=number,
        tenth="{:.1f}".format,
        # Joined as plain text: Markup would escape the tags.
        with_code=lambda words: Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(_visible(words))))),
    )
    return environment
