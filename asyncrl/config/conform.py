"""Bring what a user wrote into the schema's shape before validation: unknown keys out, kind spellings accepted."""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel

from asyncrl.config import keys
from asyncrl.config.schema import RunConfig
from asyncrl.config.suggest import suggestion

Problem = tuple[keys.Path, str]
"""A place and the half sentence that follows its name."""

_WORDS = {"yes": True, "on": True, "no": False, "off": False}


def conform(data: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """A copy of `data` that RunConfig can validate, and what is wrong that validation would not say (as well).

    Accepted: an empty section (its defaults), `yes/no/on/off` where true or false belongs, one string
    with commas where a list of names belongs.
    """
    problems: list[Problem] = []
    return _section(RunConfig, data, (), None, problems), problems


def split_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _section(
    section: type[BaseModel], given: dict[str, Any], place: keys.Path, default: Any, problems: list[Problem]
) -> dict[str, Any]:
    # A section's own default instance may differ from its class (sft.optim.lr), and must survive a partial mapping.
    result: dict[str, Any] = default.model_dump(exclude_unset=True) if isinstance(default, BaseModel) else {}
    for name in given:
        if name not in section.model_fields:
            problems += _unknown((*place, name), given[name])
    for name, field in section.model_fields.items():
        inner = keys.section_of(field.annotation)
        value = given.get(name)
        if inner and value is None:
            value = {}
        if inner and isinstance(value, dict):
            field_default = keys.default_of(field, name, default)
            result[name] = _section(inner, value, (*place, name), field_default, problems)
        elif name in given:
            result[name] = _value(field.annotation, value, (*place, name), problems)
    return result


def _value(annotation: Any, value: Any, place: keys.Path, problems: list[Problem]) -> Any:
    item, section = keys.item_of(annotation), keys.section_of(annotation)
    if section and isinstance(value, dict):
        return _section(section, value, place, None, problems)
    if item is str and isinstance(value, str):
        return split_names(value)
    if item is not None and isinstance(value, list):
        return [_value(item, one, (*place, i), problems) for i, one in enumerate(value)]
    if annotation is bool and isinstance(value, str):
        return _WORDS.get(value.lower(), value)
    if annotation in (int, float) and isinstance(value, bool):
        problems.append((place, f"is {value}: expected a {keys.annotation_text(annotation)}"))
    if annotation is bool and isinstance(value, int | float) and not isinstance(value, bool):
        problems.append((place, f"is {value!r}: expected true or false"))
    if annotation is float and isinstance(value, float) and not math.isfinite(value):
        problems.append((place, f"is {value}: expected a finite number"))
    return value


def _unknown(place: keys.Path, value: Any) -> list[Problem]:
    """One problem for each setting below an unknown key, because each has its own counterpart here."""
    if isinstance(value, dict) and value:
        return [problem for name in value for problem in _unknown((*place, name), value[name])]
    path = keys.dotted(["N" if isinstance(part, int) else part for part in place])
    if "." in str(place[-1]) and keys.place_at(tuple(str(place[-1]).split("."))):
        return [(place, "is an unknown key: in the file keys are nested; dots are for overrides on the command line")]
    if place[-1] == "<<":
        return [(place, "is an unknown key: YAML merge keys are not supported")]
    hint = suggestion(path)
    return [(place, "is an unknown key" + (f": {hint}" if hint else ""))]
