"""Load a YAML file and `a.b.c=value` overrides into the frozen RunConfig, or list everything that is wrong in one
error.

Paths inside the configuration (model.path, data files, data.format_prompt, `file.py:function`) stay as
written: relative ones are relative to the current working directory, not to the configuration file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from asyncrl.config import keys, yaml_text
from asyncrl.config.schema import RunConfig
from asyncrl.config.suggest import file_hint, suggestion
from asyncrl.errors import UserError


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the file, apply the overrides in order, check everything. UserError lists every problem at once."""
    draft = _Draft(path)
    for override in overrides:
        draft.override(override)
    config = None
    try:
        config = RunConfig.model_validate(draft.data)
    except ValidationError as error:
        for detail in error.errors():
            draft.report(detail)
    if draft.problems or config is None:
        count = len(draft.problems)
        header = f"{path}: {count} problems" if count > 1 else f"{path}"
        raise UserError("\n".join([f"{header} in the configuration:", *(f"- {p}" for p in draft.problems)]))
    return config


def dump_config(config: RunConfig) -> str:
    """YAML with every key. Loads back as an equal configuration."""
    return yaml_text.write(config.model_dump(mode="json"))


class _Draft:
    """The configuration before it is checked, and where each of its values comes from."""

    def __init__(self, path: Path) -> None:
        self.problems: list[str] = []
        self._path = path
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UserError(f"there is no configuration file {path}: {file_hint(path)}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the configuration file {path}: {error}") from None
        value, self._node = yaml_text.parse(text, str(path))
        if not isinstance(value, dict | None):
            raise UserError(f"{path} holds {value!r:.120}: expected lines such as `run_dir: runs/first`")
        self.data: dict[str, Any] = value or {}
        self._overrides: dict[keys.Path, str] = {}

    def override(self, text: str) -> None:
        """Apply one `a.b.c=value`. The value of a text key is taken as it stands, any other is YAML."""
        name, equals, raw = text.partition("=")
        if not equals or not name:
            self.problems.append(f"override {text!r} has no `=`: expected key=value, such as batch.group_size=8")
            return
        place: keys.Path = tuple(int(part) if part.isdigit() else part for part in name.strip().split("."))
        known = keys.place_at(place)
        try:
            is_text = known is not None and known.annotation is str
            value = raw if is_text else yaml_text.parse(raw, f"override {text}")[0]
            self.data = _put(self.data, place, value)
            self._overrides[place] = text
        except UserError as problem:
            self.problems.append(str(problem))
        except LookupError:
            problem = (
                f"{name}: there is no such item; the index after the last appends" if known else f"unknown key {name}"
            )
            self.problems.append(f"{problem} [override {text}]")

    def report(self, detail: Any) -> None:
        """Put one of pydantic's findings into our words."""
        place, given = detail["loc"], detail["input"]
        if detail["type"] == "extra_forbidden":
            self.problems += [self._unknown(leaf) + self._origin(place) for leaf in _leaves(place, given)]
        elif detail["type"] == "missing":
            self._report_missing(place)
        elif detail["type"] == "value_error":
            self.problems += detail["msg"].removeprefix("Value error, ").splitlines()
        else:
            known = keys.place_at(place)
            shown = "empty" if given is None else f"{given!r:.120}"
            expected = known.type_text if known else detail["msg"]
            self.problems.append(f"{keys.dotted(place)} is {shown}: expected {expected}{self._origin(place)}")

    def _report_missing(self, place: keys.Path) -> None:
        """One problem for each required key of a missing section, or for the key itself."""
        known = keys.place_at(place)
        section = keys.section_of(known.annotation) if known else None
        if section:
            for name in (name for name, field in section.model_fields.items() if field.is_required()):
                self._report_missing((*place, name))
            return
        name = keys.dotted(place)
        meaning = known.field.description if known and known.field else None
        what = f" ({meaning.strip().rstrip('.')})" if meaning else ""
        self.problems.append(f"{name} is missing{what}. Add it to {self._path}, or give {name}=VALUE")

    def _unknown(self, place: keys.Path) -> str:
        """One problem for each setting below an unknown key, because each has its own counterpart here."""
        text = f"unknown key {keys.dotted(place)}"
        if "." in str(place[-1]):
            return f"{text}: in the file keys are nested; dots are for overrides on the command line"
        hint = suggestion(keys.dotted(["N" if isinstance(part, int) else part for part in place]))
        return text + (f": {hint}" if hint else "")

    def _origin(self, place: keys.Path) -> str:
        """Name the source of a value: an override of it or of what is around it, else a line of the file."""
        for end in range(len(place), 0, -1):
            if place[:end] in self._overrides:
                return f" [override {self._overrides[place[:end]]}]"
        return f" [{self._path} line {yaml_text.line_of(self._node, place)}]"


def _put(data: Any, place: keys.Path, value: Any) -> Any:
    """Nested mappings and lists with a value put in; the index after a list's last item appends. Raises LookupError."""
    if not place:
        return value
    part, below = place[0], place[1:]
    if data is None:
        data = [] if isinstance(part, int) else {}
    if isinstance(data, list) and isinstance(part, int) and part <= len(data):
        item = data[part] if part < len(data) else None
        return [*data[:part], _put(item, below, value), *data[part + 1 :]]
    if isinstance(data, dict):
        return {**data, part: _put(data.get(part), below, value)}
    raise LookupError(part)


def _leaves(place: keys.Path, value: Any) -> Iterator[keys.Path]:
    """Every setting below an unknown key, or the key itself."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves((*place, name), inner)
    else:
        yield place
