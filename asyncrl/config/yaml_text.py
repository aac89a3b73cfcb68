"""YAML as configuration wants it: `1e-6` is a number, `no` is text, dates are text, duplicate keys are refused.

These are the rules of YAML 1.2. PyYAML alone follows 1.1, which reads `1e-6` as text and `no` as false.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from asyncrl.errors import UserError

_RULES = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
)


class _Rules:
    """Construction of values from nodes; stands before one of PyYAML's loaders among a class's bases."""

    construct_object: Any
    construct_scalar: Any

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a mapping from text to values. A name that is given twice is refused."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, ScalarNode):
                raise ConstructorError(None, None, "a key must be a plain name", key.start_mark)
            if key.value in lines:
                problem = f"{key.value} is given twice, first in line {lines[key.value]}. Keep one"
                raise ConstructorError(None, None, problem, key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return {key.value: self.construct_object(value, deep=True) for key, value in node.value}

    def construct_yaml_int(self, node: ScalarNode) -> int:
        """Read a whole number; a leading 0 is no octal number."""
        text = self.construct_scalar(node)
        return int(text, 16) if text.lower().startswith("0x") else int(text)


_LIBYAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_LIBYAML_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Loader(_Rules, yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML declares it so; _RULES fill our own table)


class _FastLoader(_Rules, _LIBYAML_LOADER):
    """Loader on libyaml, ten times as fast."""

    yaml_implicit_resolvers = {}  # noqa: RUF012


class _Dumper(_LIBYAML_DUMPER):
    """Quotes whatever YAML 1.1 or 1.2 would not read back as text."""


for _class in (_Loader, _FastLoader):
    _class.add_constructor("tag:yaml.org,2002:int", _class.construct_yaml_int)
for _tag, _pattern, _first in _RULES:
    for _class in (_Loader, _FastLoader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def parse(text: str, name: str) -> tuple[Any, Node | None]:
    """Read YAML. Returns the value and its node, which knows the lines. Raises UserError."""
    with suppress(yaml.YAMLError, ValueError):  # Python's parser says better what is wrong
        return _construct(_FastLoader, text)
    try:
        return _construct(_Loader, text)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        hint = ". YAML indents with spaces, never tabs" if "'\\t'" in str(error.problem) else ""
        raise UserError(f"{name}{line}: this is not valid YAML: {error.problem}{hint}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{name}: this is not valid YAML: {' '.join(str(error).split())}") from None


def _construct(kind: Any, text: str) -> tuple[Any, Node | None]:
    loader = kind(text)
    node = loader.get_single_node()
    return (None if node is None else loader.construct_document(node)), node


def line_of(node: Node | None, place: Sequence[str | int]) -> int:
    """The line of a place, or of the nearest thing around it that the text has."""
    line = 0
    for part in place:
        if isinstance(node, MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == str(part)), None)
            if found is None:
                break
            line, node = found[0].start_mark.line, found[1]
        elif isinstance(node, SequenceNode) and isinstance(part, int) and part < len(node.value):
            item: Node = node.value[part]
            line, node = item.start_mark.line, item
    return line + 1


def look_up(data: Any, place: Sequence[str | int]) -> Any:
    """Value at a path of nested mappings and lists; None where there is nothing."""
    for part in place:
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def put(data: Any, place: Sequence[str | int], value: Any) -> Any:
    """Nested mappings and lists with a value put in; the index after a list's last item appends. Raises LookupError."""
    if not place:
        return value
    part, below = place[0], place[1:]
    if data is None:
        data = [] if isinstance(part, int) else {}
    if isinstance(data, list) and isinstance(part, int) and part <= len(data):
        item = data[part] if part < len(data) else None
        return [*data[:part], put(item, below, value), *data[part + 1 :]]
    if isinstance(data, dict):
        return {**data, part: put(data.get(part), below, value)}
    raise LookupError(part)


def write(value: Any) -> str:
    """YAML text that `parse` reads back as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100_000)
