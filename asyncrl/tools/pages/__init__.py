"""Pieces of the web pages that `asyncrl inspect` and `asyncrl report` share: colours, and the tokens of completions.

Plain CSS and JavaScript, inlined into the pages: nothing is fetched from elsewhere.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent


def piece(name: str) -> str:
    """Read theme.css, tokens.css or tokens.js."""
    return (_FOLDER / name).read_text(encoding="utf-8")
