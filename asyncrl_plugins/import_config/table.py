"""Tables of names, one file per framework, and the translation by them.

A table has six parts. `section`: top-level keys by which a file of the framework is known. `about`: differences that no
key says. `names`: their key -> ours, or a row of name, values, replace, except, commas and note. `as_here`: keys with
one value that asks for what is done here anyway. `left_out`: keys of speed, memory or bookkeeping. `not_translated`:
keys without a counterpart, or whose meaning depends on another key. A `*` on the left matches any text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from asyncrl.config import yaml_text
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.keys import all_keys
from asyncrl.errors import UserError

FRAMEWORKS = ("verl", "easyr1", "rllava", "trl")


@dataclass(frozen=True)
class Row:
    """Translation of one key. Without a name each value lists its settings by name."""

    names: tuple[str, ...] = ()
    values: Mapping[str, Any] | None = None
    """Our value of each of theirs; a value that is not here is not translated. None: any value is taken as it is."""
    replace: Mapping[str, Any] = field(default_factory=dict)
    """Our value of some of theirs; others are taken as they are."""
    excluded: tuple[Any, ...] = ()
    """Values of theirs that are not translated."""
    commas: bool = False
    """Text with commas becomes a list."""
    note: str = ""

    def settings(self, value: Any) -> dict[str, Any] | None:
        """Return our settings for their value, or None for a value that is not translated."""
        if value in self.excluded or (self.values is not None and _text(value) not in self.values):
            return None
        ours = value if self.values is None else self.values[_text(value)]
        if not self.names:
            return dict(ours)
        ours = self.replace.get(_text(value), ours)
        if self.commas and isinstance(ours, str) and "," in ours:
            ours = [part.strip() for part in ours.split(",")]
        return {name: _in_type(name, ours) for name in self.names}

    def possible_names(self) -> set[str]:
        """Return every name of ours that the row can set."""
        return {*self.names} or {name for ours in (self.values or {}).values() for name in ours}


@dataclass(frozen=True)
class Table:
    """Table of one framework."""

    framework: str
    section: tuple[str, ...]
    about: str
    names: Mapping[str, Row]
    as_here: Mapping[str, tuple[Any, str]]
    """Key -> the value that needs no setting, and a note on the others."""
    left_out: Mapping[str, str]
    not_translated: Mapping[str, str]


@dataclass(frozen=True)
class TranslatedKey:
    """One key of theirs with its translation."""

    key: str
    value: Any
    settings: Mapping[str, Any]
    note: str


@dataclass
class Translation:
    """Translation of a whole configuration."""

    table: Table
    translated: list[TranslatedKey] = field(default_factory=list)
    left_out: list[TranslatedKey] = field(default_factory=list)
    not_translated: list[TranslatedKey] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, Any]:
        """Our settings by dotted key."""
        return {name: value for key in self.translated for name, value in key.settings.items()}


@cache
def table_of(framework: str) -> Table:
    """Read a framework's table."""
    path = Path(__file__).parent / f"{framework}.yaml"
    read, _ = yaml_text.parse(path.read_text(encoding="utf-8"), str(path))
    sections = read["section"]
    return Table(
        framework,
        (sections,) if isinstance(sections, str) else tuple(sections),
        read["about"],
        {key: _row(row) for key, row in read["names"].items()},
        {key: (row["value"], row["note"]) for key, row in read["as_here"].items()},
        read["left_out"],
        read["not_translated"],
    )


def recognise(config: Mapping[str, Any], path: Path) -> Table:
    """Find the table of a configuration by its top-level keys. Raises UserError where it is of no known framework."""
    for framework in FRAMEWORKS:
        if config.keys() & set(table_of(framework).section):
            return table_of(framework)
    keys = ", ".join(sorted(map(str, config))) or "none"
    known = "; ".join(f"{name} by {' or '.join(table_of(name).section)}" for name in FRAMEWORKS)
    raise UserError(f"{path} is of no framework that is known ({known}): its top-level keys are {keys}")


def translate(config: Mapping[str, Any], table: Table) -> Translation:
    """Translate each key of a configuration. A key that is null, or an empty section, is passed over."""
    done = Translation(table)
    given: dict[str, tuple[str, Any]] = {}
    for key, value in _leaves(config):
        if value is None or value == {}:
            continue
        found, settings, note = _look_up(key, value, table)
        for name, ours in (settings or {}).items():
            other, earlier = given.setdefault(name, (key, ours))
            if earlier != ours:
                found, note = "not_translated", f"{other} gives {name} another value: {_text(earlier)}"
        getattr(done, found).append(TranslatedKey(key, value, settings or {}, note))
    _leave_out_of_others(done)
    return done


def _leave_out_of_others(done: Translation) -> None:
    """Move keys of methods that are not chosen to those left out: here their sections do not exist."""
    given = {name.split(".")[1]: value for name, value in done.settings.items() if name.startswith("algorithm.")}
    others = AlgorithmConfig.possible_sections().keys() - AlgorithmConfig.chosen_sections(given).keys()
    for key in list(done.translated):
        sections = {".".join(name.split(".")[:2]) for name in key.settings}
        if sections & {f"algorithm.{name}" for name in others}:
            done.translated.remove(key)
            done.left_out.append(replace(key, settings={}, note="setting of a method that is not chosen"))


def _look_up(key: str, value: Any, table: Table) -> tuple[str, dict[str, Any] | None, str]:
    """Return the list of a Translation that the key belongs to, our settings, and a note."""
    if isinstance(value, str) and "${" in value:
        return "not_translated", None, "it refers to another key: print the resolved configuration"
    if row := table.names.get(key):
        settings = row.settings(value)
        return ("not_translated" if settings is None else "translated"), settings, row.note
    if key in table.as_here:
        same, note = table.as_here[key]
        return ("left_out", None, "as here") if value == same else ("not_translated", None, note)
    matches = [
        (len(pattern), part, note)
        for part in ("left_out", "not_translated")
        for pattern, note in getattr(table, part).items()
        if fnmatchcase(key, pattern)
    ]
    if not matches:
        return "not_translated", None, "it is not in the table"
    _, part, note = max(matches)
    return part, None, note


def _row(row: Any) -> Row:
    if isinstance(row, str):
        return Row((row,))
    names = row.get("name", ())
    return Row(
        names=(names,) if isinstance(names, str) else tuple(names),
        values=row.get("values"),
        replace=row.get("replace", {}),
        excluded=tuple(row.get("except", ())),
        commas=row.get("commas", False),
        note=row.get("note", ""),
    )


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _in_type(name: str, value: Any) -> Any:
    """Make a list of a single value where our key takes a list."""
    key = all_keys().get(name)
    return [value] if key and key.is_list and not isinstance(value, list) else value


def _text(value: Any) -> str:
    """Spell a value as a table's key does: `true`, `-1`, `vllm`."""
    return str(value).lower() if isinstance(value, bool) else str(value)
