"""A run's configuration, beside the defaults or that of other runs, and the machine and packages that it ran on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from asyncrl.config.keys import REQUIRED, all_keys
from asyncrl_plugins.viewer.numbers import moment
from asyncrl_plugins.viewer.recorded_run.run import Record, RecordedRun, number

PLACES = {"run_dir", *(f"{s}_port" for s in ("network.control", "network.weights"))}
"""Settings that say where a run is, not what it does: they are not compared."""
LONGEST = 300


def changed_settings(run: RecordedRun) -> list[tuple[str, str, str, str]]:
    """Return key, value, default and meaning of the settings that are not the defaults."""
    known = all_keys()
    rows = []
    for path, value in flatten(run.config).items():
        key = known.get(path)
        if key is None:
            rows.append((path, _shown(value), "no such key in this version", ""))
        elif key.default is REQUIRED or _plain(key.default) != value:
            default = "" if key.default is REQUIRED else _shown(_plain(key.default))
            rows.append((path, _shown(value), default, key.text))
    return rows


def differences(runs: Sequence[RecordedRun]) -> list[tuple[str, list[str]]]:
    """Return the settings that are not the same in all runs, with the value of each run."""
    flat = [flatten(run.config) for run in runs]
    known = all_keys()
    rows = []
    for path in dict.fromkeys(path for settings in flat for path in settings):
        default = _plain(known[path].default) if path in known and known[path].default is not REQUIRED else None
        values = [settings.get(path, default) for settings in flat]
        if path not in PLACES and any(value != values[0] for value in values):
            rows.append((path, [_shown(value) for value in values]))
    return rows


def flatten(value: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Flatten to leaves by dotted key; lists, and mappings whose names are free, are leaves."""
    if not isinstance(value, dict) or ".".join(path) in all_keys():
        return {".".join(path): value}
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat |= flatten(inner, (*path, str(name)))
    return flat


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


def environment(run: RecordedRun) -> list[tuple[str, str]]:
    """Return names and values of what a run ran on."""
    servers = {str(s["who"]): str(s.get("engine", "unknown")) for s in run.spans if s["what"] == "usage"}
    named = [("rollout server", f"{name} ({engine} engine)") for name, engine in servers.items()]
    return [*facts_of_start(run).items(), *named]


def facts_of_start(run: RecordedRun) -> dict[str, str]:
    """Return the facts of the newest start."""
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


def starts(run: RecordedRun) -> list[tuple[str, Any, str]]:
    """Return time, step and changed facts of each start."""
    rows, before = [], {}
    for start in run.starts:
        facts = dict(_facts(start))
        changed = [f"{name} {value}" for name, value in facts.items() if before and before.get(name) != value]
        rows.append((moment(number(start.get("time"))), start.get("step", "-"), ", ".join(changed) or "-"))
        before = facts
    return rows
