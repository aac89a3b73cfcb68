"""The schema seen as dotted keys (`learner.optim.lr`). Shared by loading, explaining and the reference page.

In key paths of the reference an item of a list is written `N`: `reward.functions.N.weight`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from asyncrl.config.schema import RunConfig

REQUIRED: Any = PydanticUndefined
"""Default of a key that has none."""

Path = tuple[str | int, ...]
"""A place in a configuration: names of keys and indices of list items."""

_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_SCALARS: dict[Any, str] = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "anything"}


@dataclass(frozen=True)
class Key:
    """One setting: a leaf of the schema."""

    path: str
    type_text: str
    """Values that are accepted, in words: `whole number > 0`."""
    default: Any
    """The value of a key that is left out; REQUIRED if it must be given."""
    text: str
    """The docstring of the field."""


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class that the annotation names, or None for anything else."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def item_of(annotation: Any) -> Any | None:
    """The annotation of a list's items, or None if the annotation is no list."""
    return get_args(annotation)[0] if get_origin(annotation) in (tuple, list) else None


def is_free_mapping(annotation: Any) -> bool:
    """True for keys such as rollout.engine_args, which take any names below them."""
    return annotation is dict or get_origin(annotation) is dict


def dotted(path: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in path)


def type_text(field: FieldInfo) -> str:
    """Describe what the field accepts: `whole number > 0`."""
    bounds = [
        f"{sign} {getattr(bound, name)}"
        for bound in field.metadata
        for name, sign in _BOUNDS.items()
        if hasattr(bound, name)
    ]
    return " ".join([annotation_text(field.annotation), " and ".join(bounds)]).strip()


def annotation_text(annotation: Any) -> str:
    """Describe what a type accepts: `list of text`."""
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(str(a) for a in arguments)
    if origin in (tuple, list):
        fixed = origin is tuple and arguments[-1] is not Ellipsis
        many = f"{len(arguments)} of" if fixed else "of"
        return f"list {many} {annotation_text(arguments[0])}"
    if origin in (Union, UnionType):
        return " or ".join("nothing" if a is NoneType else annotation_text(a) for a in arguments)
    if is_free_mapping(annotation) or section_of(annotation):
        return "mapping"
    return str(annotation)


def iter_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[Key]:
    """Every setting below a section, in the order of the schema."""
    for name, field in section.model_fields.items():
        path = prefix + name
        inner, item = section_of(field.annotation), section_of(item_of(field.annotation))
        if inner:
            yield from iter_keys(inner, path + ".")
        elif item:
            yield from iter_keys(item, f"{path}.N.")
        else:
            default = field.get_default(call_default_factory=True)
            yield Key(path, type_text(field), default, (field.description or "").strip())


@dataclass(frozen=True)
class Place:
    """The schema's entry for a path."""

    field: FieldInfo | None
    """The field that owns the place: for `('data', 'train_files', 0)` that of data.train_files."""
    annotation: Any
    """The type of the place itself: there `str`."""

    @property
    def type_text(self) -> str:
        """Values that are accepted there, in words."""
        own = self.field is not None and self.annotation == self.field.annotation
        return type_text(self.field) if self.field and own else annotation_text(self.annotation)


def place_at(path: Path) -> Place | None:
    """Look a path up in the schema; None if the schema has no such place."""
    annotation: Any = RunConfig
    field: FieldInfo | None = None
    for part in path:
        section = section_of(annotation)
        if section:
            field = section.model_fields.get(str(part))
            if field is None:
                return None
            annotation = field.annotation
        elif isinstance(part, int) and item_of(annotation) is not None:
            annotation = item_of(annotation)
        elif is_free_mapping(annotation):
            return Place(field, Any)
        else:
            return None
    return Place(field, annotation)
