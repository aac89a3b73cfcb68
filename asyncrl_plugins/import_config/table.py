"""Tables of names, one file per framework, and the translation by them.

A table has seven parts. `section`: top-level keys by which a file of the framework is known. `about`: differences that
no key says. `names`: their key -> ours, or a row of it, or rows of which the first whose `where` holds is taken.
`defaults`: values of keys that a file may leave out, where they change what is learnt. `as_here`: keys with one value
that asks for what is done here anyway. `left_out`: keys of speed, memory or bookkeeping, or read with another key.
`not_translated`: keys without a counterpart. A `*` on the left matches any text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from asyncrl.config import yaml_text
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.keys import all_keys
from asyncrl.errors import UserError
from asyncrl_plugins.import_config import computed

FRAMEWORKS = ("verl", "easyr1", "rllava", "trl")


@dataclass(frozen=True)
class Given:
    """Configuration of a framework, with the defaults of what it leaves out."""

    leaves: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        """Value of a key; None for one that is null, or neither given nor among the defaults."""
        return self.leaves[key] if key in self.leaves else self.defaults.get(key)


@dataclass(frozen=True)
class Row:
    """Translation of one key. Without a name each value lists its settings by name."""

    names: tuple[str, ...] = ()
    where: Mapping[str, Any] = field(default_factory=dict)
    """Keys of theirs, this one among them, with the value or the values at which the row holds."""
    values: Mapping[str, Any] | None = None
    """Our value of each of theirs; a value that is not here is not translated. None: any value is taken as it is."""
    replace: Mapping[str, Any] = field(default_factory=dict)
    """Our value of some of theirs; others are taken as they are."""
    excluded: tuple[Any, ...] = ()
    """Values of theirs that are not translated."""
    commas: bool = False
    """Text with commas becomes a list."""
    besides: Mapping[str, Any] = field(default_factory=dict)
    """Settings of ours that any translated value brings."""
    by: tuple[str, ...] = ()
    """Function of `computed`, and their keys that it takes."""
    note: str = ""

    def holds(self, theirs: Given) -> bool:
        return all(_is_among(theirs[key], wanted) for key, wanted in self.where.items())

    def settings(self, value: Any, theirs: Given) -> dict[str, Any] | None:
        """Return our settings for their value, or None for a value that is not translated."""
        if self.by:
            function, *keys = self.by
            found = getattr(computed, function)(*(theirs[key] for key in keys))
            return None if found is None else {**found, **self.besides}
        if value in self.excluded or (self.values is not None and _text(value) not in self.values):
            return None
        ours = value if self.values is None else self.values[_text(value)]
        if not self.names:
            return {**(ours if self.values else {}), **self.besides}
        ours = self.replace.get(_text(value), ours)
        if self.commas and isinstance(ours, str) and "," in ours:
            ours = [part.strip() for part in ours.split(",")]
        return {**{name: _in_type(name, ours) for name in self.names}, **self.besides}

    def possible_names(self) -> set[str]:
        """Return every name of ours that the row can set, but what is computed."""
        own = {*self.names} or {name for ours in (self.values or {}).values() for name in ours}
        return own | self.besides.keys()


@dataclass(frozen=True)
class Table:
    """Table of one framework."""

    framework: str
    section: tuple[str, ...]
    about: str
    names: Mapping[str, Sequence[Row]]
    defaults: Mapping[str, Any]
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
    defaults: list[TranslatedKey] = field(default_factory=list)
    """Keys that the file leaves out."""
    left_out: list[TranslatedKey] = field(default_factory=list)
    not_translated: list[TranslatedKey] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, Any]:
        """Our settings by dotted key."""
        return {name: value for key in self.translated + self.defaults for name, value in key.settings.items()}


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
        {
            key: [_row(row) for row in (rows if isinstance(rows, list) else [rows])]
            for key, rows in read["names"].items()
        },
        read["defaults"],
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
    """Translate each key of a configuration, and the defaults of those that it leaves out. A key that is null is
    passed over unless that is its default, and so is an empty section."""
    done = Translation(table)
    given: dict[str, tuple[str, Any]] = {}
    leaves = {key: value for key, value in _leaves(config) if value != {}}
    theirs = Given(leaves, table.defaults)
    for key, value in leaves.items():
        if value is None:
            continue
        found, settings, note = _look_up(key, value, theirs, table)
        for name, ours in (settings or {}).items():
            other, earlier = given.setdefault(name, (key, ours))
            if earlier != ours:
                found, note = "not_translated", f"{other} gives {name} another value: {_text(earlier)}"
        getattr(done, found).append(TranslatedKey(key, value, settings or {}, note))
    for key, value in table.defaults.items():
        if theirs[key] != value or leaves.get(key) is not None:
            continue
        found, settings, note = _look_up(key, value, theirs, table)
        fresh = {name: ours for name, ours in (settings or {}).items() if name not in given}
        if found == "translated" and fresh:
            done.defaults.append(TranslatedKey(key, value, fresh, note))
    _leave_out_of_others(done)
    return done


def _leave_out_of_others(done: Translation) -> None:
    """Move keys of methods that are not chosen to those left out: here their sections do not exist."""
    given = {name.split(".")[1]: value for name, value in done.settings.items() if name.startswith("algorithm.")}
    others = AlgorithmConfig.possible_sections().keys() - AlgorithmConfig.chosen_sections(given).keys()
    for part in (done.translated, done.defaults):
        for key in list(part):
            sections = {".".join(name.split(".")[:2]) for name in key.settings}
            if sections & {f"algorithm.{name}" for name in others}:
                part.remove(key)
                if part is done.translated:
                    note = "setting of a method that is not chosen"
                    done.left_out.append(replace(key, settings={}, note=note))


def _look_up(key: str, value: Any, theirs: Given, table: Table) -> tuple[str, dict[str, Any] | None, str]:
    """Return the list of a Translation that the key belongs to, our settings, and a note."""
    if isinstance(value, str) and "${" in value:
        return "not_translated", None, "it refers to another key: print the resolved configuration"
    if rows := table.names.get(key):
        row = next((row for row in rows if row.holds(theirs)), None)
        if row is None:
            return "left_out", None, f"not read there: {_unmet(rows, theirs)}"
        settings = row.settings(value, theirs)
        if settings == {}:
            return "left_out", None, row.note or "as here"
        if settings is None:
            return "not_translated", None, row.note or "there is no counterpart of this value"
        return "translated", settings, row.note
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


def _unmet(rows: Sequence[Row], theirs: Given) -> str:
    """Say which keys keep the rows from holding: `use_kl_loss is false`."""
    keys = {key for row in rows for key, wanted in row.where.items() if not _is_among(theirs[key], wanted)}
    return ", ".join(f"{key} is {_text(theirs[key])}" for key in sorted(keys))


def _row(row: Any) -> Row:
    if isinstance(row, str):
        return Row((row,))
    names = row.get("name", ())
    return Row(
        names=(names,) if isinstance(names, str) else tuple(names),
        where=row.get("where", {}),
        values=row.get("values"),
        replace=row.get("replace", {}),
        excluded=tuple(row.get("except", ())),
        commas=row.get("commas", False),
        besides=row.get("with", {}),
        by=tuple(row.get("by", ())),
        note=row.get("note", ""),
    )


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_among(value: Any, wanted: Any) -> bool:
    texts = [_text(each) for each in (wanted if isinstance(wanted, list) else [wanted])]
    return _text(value) in texts or (isinstance(value, float) and value.is_integer() and str(int(value)) in texts)


def _in_type(name: str, value: Any) -> Any:
    """Make a list of a single value where our key takes a list."""
    key = all_keys().get(name)
    return [value] if key and key.is_list and not isinstance(value, list) else value


def _text(value: Any) -> str:
    """Spell a value as a table's key does: `true`, `-1`, `vllm`, `none`."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
