"""From a YAML file and `a.b.c=value` overrides to the frozen RunConfig, or one message with everything that is wrong.

Paths inside the configuration (model.path, data files, data.format_prompt, `file.py:function`) stay as
written: relative ones are relative to the current working directory, not to the configuration file.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from asyncrl.config import keys, yaml_text
from asyncrl.config.conform import conform, split_names
from asyncrl.config.schema import RunConfig
from asyncrl.config.suggest import close_names, file_hint, known_paths, suggestion
from asyncrl.errors import UserError

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the file, apply the overrides in order, check everything. UserError lists every problem at once."""
    draft = _Draft(path)
    for override in overrides:
        draft.override(override)
    data, conform_problems = conform(draft.data)
    for place, problem in conform_problems:
        draft.report(place, problem)
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        config = None
        reported = {place for place, _ in conform_problems}
        for detail in error.errors():
            if detail["loc"] not in reported:
                draft.report_invalid(detail)
    if draft.problems or config is None:
        count = len(draft.problems)
        header = f"{path}: {count} problems" if count > 1 else f"{path}"
        raise UserError("\n".join([f"{header} in the configuration:", *(f"- {p}" for p in draft.problems)]))
    return config


def dump_config(config: RunConfig) -> str:
    """YAML with every key. Loads back as an equal configuration."""
    return yaml_text.write(config.model_dump(mode="json"))


class _Draft:
    """The configuration before it is checked, with the place that each value came from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UserError(f"there is no configuration file {path}: {file_hint(path)}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the configuration file {path}: {error}") from None
        value, self.origins, self.problems = yaml_text.parse(text, str(path))
        if value is None and self.problems:
            raise UserError("\n".join(self.problems))
        if not isinstance(value, dict | None):
            raise UserError(f"{path} holds {_short.repr(value)}: expected lines such as `run_dir: runs/first`")
        self.data: dict[str, Any] = value or {}

    def report(self, place: keys.Path, problem: str) -> None:
        origin = self._origin(place)
        self.problems.append(f"{keys.dotted(place)} {problem}" + (f" [{origin}]" if origin else ""))

    def report_invalid(self, detail: Any) -> None:
        """Put one of pydantic's findings into our words."""
        place: keys.Path = detail["loc"]
        expected = _expected(place)
        if detail["type"] == "missing":
            field = _field(place)
            what = f" ({field.description.strip().rstrip('.')})" if field and field.description else ""
            name = keys.dotted(place)
            self.problems.append(f"{name} is missing{what}. Add it to {self.path}, or give {name}=VALUE")
        elif detail["type"] == "value_error":
            for line in detail["msg"].removeprefix("Value error, ").splitlines():
                origins = {path: self.origins.get(tuple(path.split("."))) for path in known_paths() if path in line}
                where = ", ".join(f"{path}: {origin}" for path, origin in origins.items() if origin)
                self.problems.append(line + (f" [{where}]" if where else ""))
        elif detail["input"] is None:
            self.report(place, f"is empty: expected {expected}. Leave it out to get the default")
        else:
            quotes = " in quotes" if expected == "text" and isinstance(detail["input"], int | float) else ""
            meant = _meant(detail)
            self.report(
                place, f"is {_short.repr(detail['input'])}: expected {expected or detail['msg']}{quotes}{meant}"
            )

    def _origin(self, place: keys.Path) -> str:
        """Where the value was given: of the place itself or the nearest thing around it, or empty for defaults."""
        for end in range(len(place), 0, -1):
            if place[:end] in self.origins:
                return self.origins[place[:end]]
        return ""

    def override(self, text: str) -> None:
        """Apply one `a.b.c=value`."""
        name, equals, raw = text.partition("=")
        if not equals or not name:
            self.problems.append(f"override {text!r} has no `=`: expected key=value, such as batch.group_size=8")
            return
        place: keys.Path = tuple(int(part) if part.isdigit() else part for part in name.strip().split("."))
        found = keys.place_at(place)
        if found is None:
            hint = suggestion(_with_n(place))
            self.problems.append(f"unknown key {name}" + (f": {hint}" if hint else "") + f" [override {text}]")
            return
        if found.annotation is str:
            value = yaml_text.unquoted(raw)  # text as it stands: `system_prompt=Answer: yes` is no mapping
        else:
            value, _, problems = yaml_text.parse(raw, f"override {text}")
            if problems:
                self.problems += problems
                return
        if self._set(place, value, text):
            for known in [known for known in self.origins if known[: len(place)] == place]:
                del self.origins[known]
            self.origins[place] = f"override {text}"

    def _set(self, place: keys.Path, value: Any, text: str) -> bool:
        cursor: Any = self.data
        for depth, part in enumerate(place):
            last = depth == len(place) - 1
            around = keys.dotted(place[:depth])
            if isinstance(part, int) and isinstance(cursor, list):
                if part > len(cursor):
                    self.problems.append(
                        f"{around} has {len(cursor)} items, so there is no item {part} to set: use an index "
                        f"below {len(cursor)}, or {len(cursor)} to append [override {text}]"
                    )
                    return False
                if part == len(cursor):
                    cursor.append(None)
            elif not isinstance(cursor, dict):
                self.report(place[:depth], f"is {_short.repr(cursor)}, so nothing can be set below it")
                return False
            node: Any = cursor  # a list with an index, or a mapping with a key: checked above
            if last:
                node[part] = value
            else:
                inner = node.get(part) if isinstance(node, dict) else node[part]
                node[part] = _container(place[: depth + 1], inner)
                cursor = node[part]
        return True


def _container(place: keys.Path, given: Any) -> Any:
    """What an override sets into: what is there, else the default list, else an empty mapping."""
    found = keys.place_at(place)
    if found is None or keys.item_of(found.annotation) is None:
        return {} if given is None else given
    if given is None and found.field is not None:
        default = found.field.get_default(call_default_factory=True)
        return list(default) if isinstance(default, tuple | list) else []
    return split_names(given) if isinstance(given, str) else given


def _meant(detail: Any) -> str:
    """A half sentence for a misspelt name out of a few."""
    if detail["type"] != "literal_error":
        return ""
    close = close_names(str(detail["input"]), re.findall(r"'([^']*)'", detail["ctx"]["expected"]))
    return f"; did you mean {close[0]}?" if close else ""


def _field(place: keys.Path) -> Any:
    found = keys.place_at(place)
    return found.field if found else None


def _expected(place: keys.Path) -> str:
    """What the schema wants at a place, in words."""
    found = keys.place_at(place)
    if found is None:
        return ""
    if found.field is not None and found.annotation == found.field.annotation:
        return keys.type_text(found.field)
    return keys.annotation_text(found.annotation)


def _with_n(place: keys.Path) -> str:
    return keys.dotted(["N" if isinstance(part, int) else part for part in place])
