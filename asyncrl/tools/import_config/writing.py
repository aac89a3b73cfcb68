"""The imported configuration as YAML with the origin of every line, and the account of every key of theirs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.config import yaml_text
from asyncrl.config.suggest import known_paths
from asyncrl.tools.import_config.importing import ON_POLICY, Import, Line

_TITLES = {
    "taken over": "taken over, same meaning",
    "translated": "translated",
    "no counterpart": "no counterpart here",
    "unknown": "unknown: nothing was done with them",
}
_SYNCHRONOUS = "theirs generates, then trains; leave this line out to train asynchronously"


def as_yaml(done: Import) -> str:
    """Loads with `load_config` as soon as nothing is missing any more."""
    lines = [
        f"# Written by `asyncrl import-config` from {' and '.join(done.theirs.sources)} ({done.theirs.framework})."
    ]
    lines += _section(_tree(done.settings), (), done)
    # What became a setting stands beside it; these did not.
    silent = [line for line in account(done, settled=False) if line]
    return "\n".join([*lines, *(f"# {line}" for line in silent)]) + "\n"


def account(done: Import, *, settled: bool = True) -> Iterator[str]:
    """Every key of theirs, by what became of it; without `settled`, those only that became no setting."""
    for verdict, title in _TITLES.items():
        chosen = [line for line in done.lines if line.outcome.verdict == verdict]
        chosen = [line for line in chosen if settled or not line.outcome.settings]
        if chosen:
            yield f"{title} ({len(chosen)})"
            yield from (f"  {_told(line)}" for line in chosen)
    if done.missing:
        yield f"still to be given ({len(done.missing)})"
        yield from (f"  {text}" for text in done.missing)


def _told(line: Line) -> str:
    settings = ", ".join(f"{key}={_short(value)}" for key, value in line.outcome.settings.items())
    parts = [_theirs(line), f"-> {settings}" if settings else "", f"({line.outcome.text})" if line.outcome.text else ""]
    return "  ".join(part for part in parts if part)


def _theirs(line: Line) -> str:
    return f"{line.key}: {_short(line.value)}" + (" [their default]" if line.is_default else "")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _tree(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested, in the order of the schema."""
    places = {path.split(".N.")[0]: number for number, path in reversed([*enumerate(known_paths())])}
    known = [*places]

    def place(key: str) -> int:
        return next((places[path] for path in known if key == path or key.startswith(path + ".")), len(places))

    tree: dict[str, Any] = {}
    for key in sorted(settings, key=place):
        inner = tree
        *parents, name = key.split(".")
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = settings[key]
    return tree


def _section(tree: Mapping[str, Any], path: tuple[str, ...], done: Import) -> Iterator[str]:
    indent = "  " * len(path)
    for key, value in tree.items():
        place = (*path, key)
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _section(value, place, done)
        else:
            yield f"{indent}{_setting(key, value)}  # {_why('.'.join(place), done)}"


def _why(ours: str, done: Import) -> str:
    if ours == ON_POLICY:
        return _SYNCHRONOUS
    line = done.origin(ours)
    assert line is not None, ours
    return _theirs(line) + (f"; {line.outcome.text}" if line.outcome.text else "")


def _setting(key: str, value: Any) -> str:
    if isinstance(value, list):
        return f"{key}: {json.dumps(value, ensure_ascii=False)}"
    if isinstance(value, str) and "\n" in value:
        return f"{key}: {json.dumps(value, ensure_ascii=False)}"
    return yaml_text.write({key: value}).rstrip()
