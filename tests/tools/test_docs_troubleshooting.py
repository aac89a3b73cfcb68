"""Every message that docs/troubleshooting.md quotes stands in the source, with `…` where it has values."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = re.findall(r"\*\*`([^`]+)`\*\*", PAGE.read_text())
VALUE = "\0"
PACKAGES = ("asyncrl", "learner", "rollout_server", "protocol")


@cache
def texts() -> tuple[str, ...]:
    """Every string of the source; a formatted value is `VALUE`."""
    files = [
        path
        for package in ("asyncrl", "learner", "rollout_server", "protocol")
        for path in (ROOT / package).rglob("*.py")
    ]
    return tuple(text for path in files for text in _strings(ast.parse(path.read_text())))


def _strings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        parts = [str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values]
        yield "".join(parts)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from _strings(child)


@pytest.mark.parametrize("message", QUOTED)
def test_the_message_stands_in_the_source(message: str) -> None:
    pattern = ".*?".join(re.escape(part) for part in message.split("…"))
    assert any(re.search(pattern, text, re.S) for text in texts())


def test_enough_of_them_are_there() -> None:
    assert len(QUOTED) >= 30
    assert len(set(QUOTED)) == len(QUOTED)


def test_a_message_that_nobody_says_is_noticed() -> None:
    assert not any("the flux capacitor is empty" in text for text in texts())
    assert any(VALUE in text for text in texts())


def test_every_alert_has_a_line() -> None:
    rules = yaml.safe_load((ROOT / "docker" / "prometheus" / "alerts.yml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule}
    section = PAGE.read_text().split("## Alerts")[1].split("\n## ")[0]
    firsts = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name for cell in firsts for name in re.findall(r"`(\w+)`", cell)} == alerts
