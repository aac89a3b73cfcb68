"""A run's settings: what differs from the defaults, or between runs, and all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from asyncrl.config.keys import REQUIRED, Key, is_free_mapping, iter_keys, place_at
from asyncrl.tools.report.markup import text
from asyncrl.tools.report.run import Run

PLACES = {"run_dir", *(f"{s}_port" for s in ("network.control", "network.weights"))}
"""Settings that say where a run is, not what it does."""
LONGEST = 300
_CODE = re.compile("`([^`]+)`")


def configuration(run: Run) -> str:
    """HTML: the differences from the defaults, and below them the whole file."""
    if not run.config_text:
        return '<p class="empty">There is no config.yaml that could be read.</p>'
    known = _known()
    rows = []
    for path, value in flatten(run.config).items():
        key = known.get(path)
        if key is None:
            rows.append((path, value, "no such key in this version", ""))
        elif key.default is not REQUIRED and _plain(key.default) != value:
            rows.append((path, value, _shown(_plain(key.default)), key.text))
        elif key.default is REQUIRED:
            rows.append((path, value, "", key.text))
    body = "".join(
        f'<tr><td class="key">{text(path)}</td><td class="value">{text(_shown(value))}</td><td class="default">'
        f"{text(default)}</td><td>{_with_code(meaning)}</td></tr>"
        for path, value, default, meaning in rows
    )
    table = (
        "<table><thead><tr><th>key</th><th>value</th><th>default</th><th>meaning</th></tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )
    whole = f"<details><summary>The whole configuration</summary><pre>{text(run.config_text)}</pre></details>"
    return table + whole


def _with_code(meaning: str) -> str:
    return _CODE.sub(r"<code>\1</code>", text(meaning))


def differences(runs: Sequence[Run]) -> str:
    """HTML: settings that are not the same in all of them."""
    flat = [flatten(run.config) for run in runs]
    known = _known()
    paths = dict.fromkeys(path for settings in flat for path in settings)
    body = []
    for path in paths:
        default = _plain(known[path].default) if path in known and known[path].default is not REQUIRED else None
        values = [settings.get(path, default) for settings in flat]
        if path not in PLACES and any(value != values[0] for value in values):
            cells = "".join(f'<td class="value">{text(_shown(value))}</td>' for value in values)
            body.append(f'<tr><td class="key">{text(path)}</td>{cells}</tr>')
    if not body:
        return '<p class="empty">Their configurations are the same, but for where they are.</p>'
    names = "".join(f"<th>{text(run.name)}</th>" for run in runs)
    return f"<table><thead><tr><th>key</th>{names}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def flatten(value: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Leaves by dotted key; lists, and mappings whose names are free, are leaves."""
    if not isinstance(value, dict) or (path and _is_free(path)):
        return {".".join(path): value}
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat |= flatten(inner, (*path, str(name)))
    return flat


def _is_free(path: tuple[str, ...]) -> bool:
    place = place_at(path)
    return place is not None and is_free_mapping(place.annotation)


@cache
def _known() -> dict[str, Key]:
    """A list of sections, such as reward.functions, is one key here."""
    known: dict[str, Key] = {}
    for key in iter_keys():
        before, item, _ = key.path.partition(".N.")
        place = place_at(tuple(before.split("."))) if item else None
        if place and place.field:
            default = place.field.get_default(call_default_factory=True)
            known[before] = Key(before, "list", default, (place.field.description or "").strip())
        else:
            known[before] = key
    return known


def _plain(value: Any) -> Any:
    """As YAML would hold it."""
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, list):
        shown = ("; " if any(isinstance(item, dict) for item in value) else ", ").join(map(_shown, value)) or "none"
    elif isinstance(value, dict):
        shown = ", ".join(f"{name}: {_shown(item)}" for name, item in value.items() if item not in ("", {}, None))
    elif value == "":
        shown = "empty"
    else:
        shown = str(value).lower() if isinstance(value, bool) else str(value)
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"
