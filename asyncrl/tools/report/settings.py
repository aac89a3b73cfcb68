"""A run's configuration, beside the defaults or that of other runs, and the machine and packages that it ran on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from asyncrl.config.keys import REQUIRED, Key, is_free_mapping, iter_keys, place_at
from asyncrl.tools.report.markup import moment, text
from asyncrl.tools.report.recorded_run import Record, RecordedRun, number

PLACES = {"run_dir", *(f"{s}_port" for s in ("network.control", "network.weights"))}
"""Settings that say where a run is, not what it does: they are not compared."""
LONGEST = 300
_CODE = re.compile("`([^`]+)`")


def configuration(run: RecordedRun) -> str:
    """Show the differences from the defaults as HTML, and below them the whole file."""
    if not run.config_text:
        return '<p class="empty">There is no config.yaml that could be read.</p>'
    known = _known()
    rows = []
    for path, value in flatten(run.config).items():
        key = known.get(path)
        if key is None:
            rows.append((path, value, "no such key in this version", ""))
        elif key.default is REQUIRED or _plain(key.default) != value:
            rows.append((path, value, "" if key.default is REQUIRED else _shown(_plain(key.default)), key.text))
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


def differences(runs: Sequence[RecordedRun]) -> str:
    """Show the settings that are not the same in all runs as HTML."""
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
    """Flatten to leaves by dotted key; lists, and mappings whose names are free, are leaves."""
    place = place_at(path) if path else None
    if not isinstance(value, dict) or (place is not None and is_free_mapping(place.annotation)):
        return {".".join(path): value}
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat |= flatten(inner, (*path, str(name)))
    return flat


@cache
def _known() -> dict[str, Key]:
    """Return the keys by path, with a list of sections, such as reward.functions, as one key."""
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
    """Convert tuples to lists, as YAML holds them."""
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


# --- the environment -------------------------------------------------------------------------------


def environment(run: RecordedRun) -> str:
    """Show what a run ran on as HTML, and what changed between its starts."""
    if not run.starts:
        return '<p class="empty">It is not known what this run ran on.</p>'
    latest = run.starts[-1]
    rows = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in _facts(latest))
    servers = {str(s["who"]): str(s.get("engine", "unknown")) for s in run.spans if s["what"] == "usage"}
    rows += "".join(
        f"<dt>rollout server</dt><dd>{text(name)} ({text(engine)} engine)</dd>" for name, engine in servers.items()
    )
    return f'<dl class="facts">{rows}</dl>{_starts(run) if len(run.starts) > 1 else ""}'


def facts_of_start(run: RecordedRun) -> dict[str, str]:
    """Return the facts of the newest start, for a comparison."""
    return dict(_facts(run.starts[-1])) if run.starts else {}


def _facts(start: Record) -> Iterator[tuple[str, str]]:
    for name in ("device", "gpus", "cpu", "cores", "memory_gib", "os", "python"):
        value = start.get(name)
        if value not in (None, "", []):
            yield name.replace("memory_gib", "memory, GiB"), _joined(value)
    for section, prefix in (("packages", ""), ("git", "commit of ")):
        named = start.get(section)
        for name, value in named.items() if isinstance(named, dict) else ():
            yield f"{prefix}{name}", str(value)


def _joined(value: Any) -> str:
    """Join a list, with equal names as `2 x NVIDIA H100`."""
    if not isinstance(value, list):
        return str(value)
    names = [str(name) for name in value]
    return ", ".join(f"{names.count(n)} x {n}" if names.count(n) > 1 else n for n in dict.fromkeys(names))


def _starts(run: RecordedRun) -> str:
    rows, before = [], {}
    for start in run.starts:
        facts = dict(_facts(start))
        changed = [f"{name} {value}" for name, value in facts.items() if before and before.get(name) != value]
        at = moment(number(start.get("time")))
        rows.append(
            f"<tr><td>{at}</td><td>{text(start.get('step', '-'))}</td><td>{text(', '.join(changed) or '-')}</td></tr>"
        )
        before = facts
    head = "<tr><th>started</th><th>after step</th><th>changed since the last start</th></tr>"
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"
