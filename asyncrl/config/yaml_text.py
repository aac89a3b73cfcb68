"""YAML as configuration wants it: `1e-6` is a number, `no` is text, dates are text, duplicate keys are refused.

These are the rules of YAML 1.2. PyYAML alone follows 1.1, which reads `1e-6` as text and `no` as false.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from asyncrl.config.keys import Path, dotted

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


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML declares it so; _RULES fill our own table)


class _Dumper(yaml.SafeDumper):
    """Quotes whatever YAML 1.1 or 1.2 would not read back as text."""


for _tag, _pattern, _first in _RULES:
    _compiled = re.compile(f"^(?:{_pattern})$")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _compiled, list(_first))
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _compiled, list(_first))


def _whole_number(loader: yaml.SafeLoader, node: ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, 16) if text.lower().startswith("0x") else int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def parse(text: str, name: str) -> tuple[Any, dict[Path, str], list[str]]:
    """Read YAML. Returns the value, where each place came from (`run.yaml line 7`), and the problems found."""
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        return None, {}, [f"{name}: this is not valid YAML: {' '.join(str(error).split())}"]
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}, []
        reading = _Reading(loader, name)
        value = reading.value(node, ())
        return value, reading.origins, reading.problems
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        hint = ". YAML indents with spaces, never tabs" if "'\\t'" in str(error.problem) else ""
        return None, {}, [f"{name}{line}: this is not valid YAML: {error.problem}{hint}"]
    except (yaml.YAMLError, ValueError) as error:
        return None, {}, [f"{name}: this is not valid YAML: {error}"]
    finally:
        loader.dispose()


class _Reading:
    """Walks the node tree of one document, because only nodes know their lines."""

    def __init__(self, loader: _Loader, name: str) -> None:
        self.origins: dict[Path, str] = {}
        self.problems: list[str] = []
        self._loader = loader
        self._name = name
        self._open: list[Node] = []

    def value(self, node: Node, path: Path) -> Any:
        if any(node is parent for parent in self._open):
            raise yaml.YAMLError(f"an alias at {self._at(node)} contains itself")
        self.origins[path] = self._at(node)
        self._open.append(node)
        try:
            if isinstance(node, MappingNode):
                return self._mapping(node, path)
            if isinstance(node, SequenceNode):
                return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
            return self._loader.construct_object(node)
        finally:
            self._open.pop()

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                self.problems.append(f"{self._at(key_node)}: a key must be a plain name")
                continue
            key = str(key_node.value)
            place = (*path, key)
            if key in result:
                self.problems.append(
                    f"{dotted(place)} is given twice: at {self.origins[place]} and {self._at(key_node)}. Keep one"
                )
                continue
            result[key] = self.value(value_node, place)
            self.origins[place] = self._at(key_node)
        return result

    def _at(self, node: Node) -> str:
        return f"{self._name} line {node.start_mark.line + 1}"


def write(value: Any) -> str:
    """YAML text that `parse` reads back as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100_000)


def unquoted(text: str) -> str:
    """The text of a scalar: as it stands, or without the quotes around all of it."""
    stripped = text.strip()
    if len(stripped) >= 2 and stripped[0] == stripped[-1] and stripped[0] in "'\"":
        value, _, problems = parse(stripped, "")
        if isinstance(value, str) and not problems:
            return value
    return stripped
