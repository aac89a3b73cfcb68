"""The page as one piece: markup, styles and script in one answer, so that nothing else is fetched but data."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from asyncrl.tools.pages import piece

_FOLDER = Path(__file__).parent / "page"


@cache
def _style() -> str:
    return "\n".join([piece("theme.css"), piece("tokens.css"), _read("inspect.css")])


@cache
def _script() -> str:
    return "\n".join([piece("tokens.js"), *(_read(name) for name in ("address.js", "group.js", "inspect.js"))])


def page() -> str:
    return _read("index.html").replace("/*style*/", _style()).replace("/*script*/", _script())


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        f"script-src 'sha256-{_digest(_script())}'",
        f"style-src 'sha256-{_digest(_style())}'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ]
)
"""The browser runs this page's own script and nothing that a sample could bring in."""
