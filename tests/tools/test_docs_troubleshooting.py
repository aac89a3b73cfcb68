"""Every message that docs/troubleshooting.md quotes stands in the source, with `…` where it has values."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = re.findall(r"\*\*`([^`]+)`\*\*", PAGE.read_text())
VALUE = "\0"
PACKAGES = ("asyncrl", "asyncrl_plugins", "learner", "rollout_server", "protocol")


@cache
def texts() -> tuple[str, ...]:
    """All strings of the source; a formatted value is `VALUE`."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return tuple(text for path in files for text in _strings(ast.parse(path.read_text())))


def _strings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        parts = [str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values]
        yield "".join(parts)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from _strings(child)


def test_every_message_stands_in_the_source() -> None:
    assert len(QUOTED) >= 30
    assert len(set(QUOTED)) == len(QUOTED)
    missing = [message for message in ["the flux capacitor is empty", *QUOTED] if not stands_in_the_source(message)]
    assert missing == ["the flux capacitor is empty"]


def stands_in_the_source(message: str) -> bool:
    parts = message.split("…")
    longest, pattern = max(parts, key=len), ".*?".join(map(re.escape, parts))
    return any(longest in text and re.search(pattern, text, re.S) for text in texts())


def test_every_alert_has_a_line() -> None:
    rules = yaml.safe_load((ROOT / "docker" / "prometheus" / "alerts.yml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule}
    section = PAGE.read_text().split("## Alerts")[1].split("\n## ")[0]
    firsts = [line.split("|")[1] for line in section.splitlines() if line.startswith("| <a id=")]
    assert {name for cell in firsts for name in re.findall(r"`(\w+)`", cell)} == alerts
