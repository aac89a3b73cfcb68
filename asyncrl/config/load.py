"""Load a YAML file, overlays and `a.b.c=value` overrides into the frozen RunConfig, or list everything that is wrong in
one error.

Paths inside the configuration (model.path, data files, data.format_prompt, `file.py:function`) stay as
written: relative ones are relative to the current working directory, not to the configuration file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from asyncrl.config import yaml_text
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.installed_methods import method_of, method_sets
from asyncrl.config.keys import REQUIRED, all_keys, section_of, similar_keys
from asyncrl.config.method import CHOICE_KEYS, Kind, Method
from asyncrl.config.parts import ROLLOUT_ENGINES
from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import OpenSection
from asyncrl.errors import UserError, did_you_mean, file_hint
from asyncrl.plugins import descriptions, installed, what_to_install

Place = tuple[str | int, ...]
"""A place in a configuration: names of keys and indices of list items."""
WITH_DEFAULTS: tuple[Kind, ...] = ("advantage", "policy_loss")
"""Kinds of methods that have defaults of keys of the `algorithm` section."""
REPLACED = "replaced"
"""The key of RunConfig that says what a method's word has replaced."""
BY_HAND = math.inf
"""Rank of a key=value: no overlay comes after it. Overlays are ranked by their place on the command line, from 1."""


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the file, if there is one, apply overrides and overlays in order, check everything. UserError lists every
    problem at once.

    An override without `=` is an overlay: a YAML file, or the name of an algorithm's or a task's.
    """
    draft = _Draft(path)
    if any(is_method(word) for word in overrides if "=" not in word):
        draft.start_over()
    for word in overrides:
        if "=" in word:
            draft.override(word)
        else:
            draft.lay_over(word)
    draft.change_methods()
    draft.forget_sections()
    draft.note_replaced()
    config = None
    try:
        config = RunConfig.model_validate(draft.data)
    except ValidationError as error:
        for detail in error.errors():
            draft.report(detail)
    draft.report_unknown()
    if draft.problems or config is None:
        count = len(draft.problems)
        header = f"{draft.source}: {count} problems" if count > 1 else f"{draft.source}"
        raise UserError("\n".join([f"{header} in the configuration:", *(f"- {p}" for p in draft.problems)]))
    return config


def dump_config(config: RunConfig, *, whole: bool = True) -> str:
    """YAML with every key, or without those at their defaults. Loads back as an equal configuration."""
    return yaml_text.write(config.model_dump(mode="json", exclude_defaults=not whole))


@cache
def shipped_overlays(kind: Literal["algorithms", "tasks"]) -> Mapping[str, Path]:
    """Overlays of a kind, by name: those of the core first. No name is of two."""
    tasks = (each.overlays for each in descriptions("tasks").values())
    folders = (each.overlays for each in method_sets().values()) if kind == "algorithms" else tasks
    return {file.stem: file for folder in folders if folder for file in sorted(folder.glob("*.yaml"))}


def find_overlay(word: str) -> Path:
    """The file of an overlay: a few keys to lay over a configuration. `word` is its path, or the name of an algorithm
    or a task. UserError for anything else."""
    if word.endswith((".yaml", ".yml")):
        return Path(word)
    algorithms, tasks = shipped_overlays("algorithms"), shipped_overlays("tasks")
    named = {**algorithms, **tasks}
    if word in named:
        return named[word]
    if word in installed("commands"):
        raise UserError(f"{word!r} is a command, and begins a line of its own: asyncrl {word} --help")
    choices = (parts for section in _open_sections().values() for parts in section.choices.values())
    meant = [f"{parts.key}={word}" for parts in choices if parts.find(word)]
    there = f"; tasks are {', '.join(tasks)}" if tasks else f". Tasks are plug-ins. {what_to_install('tasks')}"
    near = f" Did you mean {' or '.join(meant)}?" if meant else did_you_mean(word, named)
    raise UserError(
        f"override {word!r} has no `=`: expected key=value, such as batch.group_size=8, or an overlay: a YAML file or "
        f"the name of an algorithm or a task.{near} Algorithms are {', '.join(algorithms)}{there}"
    )


def is_method(word: str) -> bool:
    """True for an algorithm's overlay that ships, by its name or its path."""
    algorithms = shipped_overlays("algorithms")
    return word in algorithms or Path(word).resolve() in algorithms.values()


def leaves(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield each key that an overlay gives, with its value: a mapping that is itself a setting, a list, and a section
    without keys, whole."""
    is_key = ".".join(map(str, place)) in all_keys()
    if isinstance(value, dict) and value and not is_key:
        for name, inner in value.items():
            yield from leaves(inner, (*place, name))
    elif value is not None or is_key:  # an empty section changes nothing
        yield place, value


@cache
def _open_sections() -> Mapping[str, type[OpenSection]]:
    """Sections with sub-sections that exist only where their part is chosen."""
    found = ((name, section_of(field.annotation)) for name, field in RunConfig.model_fields.items())
    return {name: section for name, section in found if section and issubclass(section, OpenSection)}


class _Draft:
    """The configuration before it is checked, and where each of its values comes from."""

    def __init__(self, path: Path | None) -> None:
        self.problems: list[str] = []
        self._unknown: list[tuple[Place, str]] = []
        """Keys that there are not, with their sources."""
        self.source = path or "the overrides"
        self.data, self._node = _read(path) if path else ({}, None)
        self._words: dict[Place, tuple[str, float]] = {}
        """Source and rank of the word that set each value that is not from the file."""
        self._overlays = 0
        self._replaced: dict[Place, Any] = {}
        """Values of keys before a method's word changed them; None: no value."""
        self._file = {name: dict(value) for name, value in self.data.items() if isinstance(value, dict)}
        """Sections of the file."""

    def start_over(self) -> None:
        """Undo what another method's word has changed in the file of a run, which says all keys: what is left of it
        would be mixed with the new method."""
        replaced = self.data.pop(REPLACED, None)
        algorithm = self.data.get("algorithm")
        if not isinstance(replaced, dict) or not isinstance(algorithm, dict):
            return
        sections: set[str] = set()
        for kind in WITH_DEFAULTS:
            key = CHOICE_KEYS[kind]
            with suppress(ValueError):  # a wrong row, which the check reports
                sections |= AlgorithmConfig.chosen_sections(algorithm).keys()
                self._forget_defaults(algorithm, method_of(kind, str(algorithm.get(key))), BY_HAND)
        self._replaced.clear()
        for name, value in replaced.items():
            place = tuple(str(name).split("."))
            self.data = yaml_text.put(self.data, place, value)
            if value is None:
                yaml_text.look_up(self.data, place[:-1]).pop(place[-1])
        algorithm = self.data["algorithm"]
        for name in sections - AlgorithmConfig.chosen_sections(algorithm).keys():
            algorithm.pop(name, None)
        self._file["algorithm"] = dict(algorithm)

    def note_replaced(self) -> None:
        """Say in the configuration what a method's word has replaced, so that another one begins there."""
        if self._replaced:
            self.data[REPLACED] = {".".join(map(str, place)): value for place, value in self._replaced.items()}

    def override(self, text: str) -> None:
        """Apply one `a.b.c=value`, or add to a list with `a.b.c+=value`. The value of a text key is taken as it stands,
        any other is YAML."""
        name, _, raw = text.partition("=")
        name, plus = name.strip().removesuffix("+").rstrip(), "+" * name.rstrip().endswith("+")
        place: Place = tuple(int(part) if part.isdigit() else part for part in name.split("."))
        path = _schema_path(place)
        if not name:
            self.problems.append(f"override {text!r} has no key: expected key=value, such as batch.group_size=8")
        elif not any(f"{key}.".startswith(f"{path}.") or path.startswith(f"{key}.") for key in all_keys()):
            self._unknown.append((place, f" [override {text}]"))
        else:
            key = all_keys().get(path)
            try:
                value = raw if key and key.field.annotation is str else yaml_text.parse(raw, f"override {text}")[0]
                self._put((*place[:-1], f"{place[-1]}+") if plus else place, value, f"override {text}", BY_HAND)
            except UserError as problem:
                self.problems.append(str(problem))
            except LookupError:
                problem = f"{name}: there is no such key or item; the index after the last appends"
                self.problems.append(f"{problem} [override {text}]")

    def lay_over(self, word: str) -> None:
        """Apply an overlay: each of its keys as an override would be."""
        try:
            path = find_overlay(word)
            data, node = _read(path)
        except UserError as problem:
            self.problems.append(str(problem))
            return
        self._overlays += 1
        names_method = is_method(word)
        for place, value in leaves(data):
            is_key = ".".join(map(str, place)) in all_keys()
            if value == {} and not is_key and yaml_text.look_up(self.data, place):  # a section that is there stays
                continue
            origin = f"{path} line {yaml_text.line_of(node, place)}"
            try:
                self._put(place, value, origin, self._overlays, of_method=names_method)
            except UserError as problem:
                self.problems.append(str(problem))
            except LookupError:
                self.problems.append(f"{'.'.join(map(str, place))}: there is no such key [{origin}]")

    def _put(self, place: Place, value: Any, origin: str, rank: float, *, of_method: bool = False) -> None:
        """Put a value in; at a place whose last name ends in `+` add it to the list that is there, or the items of it.
        Raises LookupError, and UserError for what is no list."""
        name = str(place[-1])
        if name.endswith("+"):
            place = (*place[:-1], name.removesuffix("+"))
            key = all_keys().get(_schema_path(place))
            if key and not key.is_list:
                raise UserError(
                    f"{key.path} is no list, and nothing can be added to it. Write {key.path}=VALUE [{origin}]"
                )
            value = _extended(yaml_text.look_up(self.data, place), value)
        if of_method and place not in self._words and place[:2] not in self._replaced:
            new = place[:2] if _is_of_method(place) and not yaml_text.look_up(self.data, place[:2]) else place
            self._replaced.setdefault(new, yaml_text.look_up(self.data, new))
        self.data = yaml_text.put(self.data, place, value)
        self._words[place] = origin, rank

    def _rank(self, section: str, name: str) -> float:
        """Rank of the last word that set `section.name` or a key in it; 0 for the file."""
        return max((rank for place, (_, rank) in self._words.items() if place[:2] == (section, name)), default=0)

    def change_methods(self) -> None:
        """Forget what the file, and overlays before it, say of keys that a method named by an override, or the one that
        it replaces, has defaults for: the file of a run says all keys, and they were the other method's."""
        algorithm, before = self.data.get("algorithm"), self._file.get("algorithm", {})
        if not isinstance(algorithm, dict):
            return
        for kind in WITH_DEFAULTS:
            key = CHOICE_KEYS[kind]
            rank = self._rank("algorithm", key)
            for name in (before.get(key), algorithm.get(key)) if rank else ():
                with suppress(ValueError):  # a wrong row, which the check reports
                    self._forget_defaults(algorithm, method_of(kind, str(name)), rank)

    def _forget_defaults(self, algorithm: dict[str, Any], method: Method | None, rank: float) -> None:
        """Keys of `rank` and above stay."""
        for default, value in method.defaults.items() if method else ():
            if self._rank("algorithm", default) < rank:
                if default in algorithm:
                    self._replaced.setdefault(("algorithm", default), algorithm.pop(default))
                if default == "policy_loss":
                    self._forget_defaults(algorithm, method_of("policy_loss", str(value)), rank)

    def forget_sections(self) -> None:
        """Forget the sections of methods, engines and other parts that a later word has replaced by other ones."""
        for name, section in _open_sections().items():
            now = self.data.get(name)
            if not isinstance(now, dict):
                continue
            with suppress(ValueError):  # a wrong row of a user's method, which the check reports
                before, chosen = (section.chosen_sections(given) for given in (self._file.get(name, {}), now))
                changed = max(self._rank(name, key) for key in section.choice_keys())
                for part in section.possible_sections().keys() & now.keys() - chosen.keys():
                    if (rank := self._rank(name, part)) < changed and (rank or part in before):
                        settings = now.pop(part)
                        if name == "algorithm":
                            self._replaced.setdefault((name, part), settings)

    def report(self, detail: Any) -> None:
        """Translate a pydantic error into our messages."""
        place, given = detail["loc"], detail["input"]
        name, path = ".".join(map(str, place)), _schema_path(place)
        if detail["type"] == "missing":
            required = (key.path.removeprefix(path) for key in all_keys().values() if key.default is REQUIRED)
            below = [name + rest for rest in required if rest.startswith(".") and ".N." not in rest]
            for missing in below or [name]:
                self.problems.append(f"{missing} is missing. Add it to {self.source}, or give {missing}=VALUE")
        elif detail["type"] == "value_error":
            self.problems += detail["msg"].removeprefix("Value error, ").splitlines()
        elif detail["type"] == "extra_forbidden":
            self._unknown.append((place, self._origin(place)))
        elif detail["type"] == "unchosen_section":
            inside = (f" [{origin}]" for at, (origin, _) in self._words.items() if at[: len(place)] == place)
            origin = next(inside, self._origin(place))
            self.problems.append(f"{name} {detail['msg']}. Set that, or leave {name} out{origin}")
        else:
            key = all_keys().get(path)
            shown = "empty" if given is None else f"{given!r:.120}"
            inner = [each.removeprefix(f"{path}.") for each in all_keys() if each.startswith(f"{path}.")]
            expected = f"expected {key.type_text}" if key else detail["msg"]
            if not key and inner:
                expected = f"expected a mapping with keys of {', '.join(inner)}"
            self.problems.append(f"{name} is {shown}: {expected}{self._origin(place)}")

    def report_unknown(self) -> None:
        """Report unknown keys, each with those that may be meant: keys of the chosen parts first."""
        unchosen: dict[str, str] = {}
        for name, section in _open_sections().items():
            given = self.data.get(name)
            given = given if isinstance(given, dict) else {}
            with suppress(ValueError):  # a wrong row of a user's method, which the check reports
                hidden = section.possible_sections().keys() - section.chosen_sections(given).keys()
                unchosen |= {f"{name}.{part}": section.choice_of(part, given) for part in hidden}
        for place, origin in self._unknown:
            path = _schema_path(place)
            closed = next((each for each, choice in unchosen.items() if choice and path.startswith(f"{each}.")), "")
            if "." in str(place[-1]):
                meant = ": in the file keys are nested; dots are for overrides on the command line"
            elif closed:
                meant = f": {closed} exists only with {unchosen[closed]}"
            elif bare := _engine_without_settings(place):
                meant = f": {bare} has no section of its own, only rollout.engine_args"
            elif close := similar_keys(path, unchosen):
                meant = f": did you mean {' or '.join(close)}?"
            elif place[0] == "environment":
                meant = (
                    ": an environment's own settings stand in environment.config, such as environment.config.functions"
                )
            else:
                meant = ". docs/migration.md has other frameworks' names"
            self.problems.append(f"unknown key {'.'.join(map(str, place))}{meant}{origin}")

    def _origin(self, place: Place) -> str:
        """Locate the source of a value: an override of it or of a section around it, else a line of the file."""
        for end in range(len(place), 0, -1):
            if place[:end] in self._words:
                return f" [{self._words[place[:end]][0]}]"
        return f" [{self.source} line {yaml_text.line_of(self._node, place)}]"


def _read(path: Path) -> tuple[dict[str, Any], Any]:
    """The file's mapping, and its node, which knows the lines. Raises UserError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no configuration file {path}: {file_hint(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the configuration file {path}: {error}") from None
    value, node = yaml_text.parse(text, str(path))
    if not isinstance(value, dict | None):
        raise UserError(f"{path} holds {value!r:.120}: expected lines such as `run_dir: runs/first`")
    return value or {}, node


def _is_of_method(place: Place) -> bool:
    """Whether the place is in a method's own section."""
    return len(place) > 2 and place[0] == "algorithm" and place[1] in AlgorithmConfig.possible_sections()


def _engine_without_settings(place: Place) -> str:
    """`rollout.engine=vllm` for a key such as rollout.vllm.dtype, where the engine is installed; empty for others."""
    section, *below = place
    is_engine = section == "rollout" and below and ROLLOUT_ENGINES.find(below[0])
    return f"rollout.engine={below[0]}" if is_engine else ""


def _schema_path(place: Place) -> str:
    return ".".join("N" if isinstance(part, int) else part for part in place)


def _extended(there: Any, more: Any) -> list[Any]:
    """A list with items after it, but for those that it has: a section that says all that an item says is that item."""
    has = _items(there)
    return [*has, *(item for item in _items(more) if not any(_says(one, item) for one in has))]


def _items(value: Any) -> list[Any]:
    """The items of a list, of names with commas, or of one thing."""
    if isinstance(value, str):
        return value.split(",")
    return value if isinstance(value, list) else [value] * (value is not None)


def _says(one: Any, item: Any) -> bool:
    if isinstance(one, dict) and isinstance(item, dict):
        return all(key in one and one[key] == value for key, value in item.items())
    return one == item
