"""The section `environment` from a YAML file or from words on the command line, as `asyncrl env` takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from asyncrl.config import yaml_text
from asyncrl.config.environment import EnvironmentConfig
from asyncrl.config.sections import DataConfig
from asyncrl.errors import UserError, field_problem


def read_environment(values: dict[str, Any], where: str = "environment") -> EnvironmentConfig:
    """The section of these values. Raises UserError naming the key."""
    try:
        return EnvironmentConfig.model_validate(values)
    except ValidationError as error:
        raise UserError("; ".join(_problem(detail, where) for detail in error.errors())) from None


def is_file(name: str) -> bool:
    """True for the name of a YAML file, false for a class."""
    return name.endswith((".yaml", ".yml"))


def load_environment(path: Path, overrides: list[str]) -> EnvironmentConfig:
    """The section `environment` of a YAML file, or the whole file, with `key=value` on top. Raises UserError."""
    values = _read(path)
    if "environment" not in values and not values.keys() & EnvironmentConfig.model_fields.keys():
        raise UserError(f"{path} has no section `environment`. Add one with a `name`, or name a class or plug-in here")
    return override(values.get("environment", values), overrides)


def load_data(path: Path) -> DataConfig | None:
    """The section `data` of a YAML file; None without one. Raises UserError."""
    values = _read(path).get("data")
    try:
        return None if values is None else DataConfig.model_validate(values)
    except ValidationError as error:
        problems = (field_problem(detail, DataConfig.model_fields, "data.") for detail in error.errors())
        raise UserError(f"{path}: {'; '.join(problems)}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        values, _ = yaml_text.parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    return values if isinstance(values, dict) else {}


def override(values: dict[str, Any], overrides: list[str]) -> EnvironmentConfig:
    """The section with `key=value` on top, such as `limits.turns=3`. Raises UserError."""
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals:
            raise UserError(f"{word!r} is no key=value, such as limits.turns=3")
        value, _ = yaml_text.parse(text, word)
        try:
            values = yaml_text.put(values, tuple(key.removeprefix("environment.").split(".")), value)
        except LookupError as part:
            raise UserError(f"{word!r}: there is no section above {part}") from None
    return read_environment(values)


def _problem(detail: Any, where: str) -> str:
    section: Any = EnvironmentConfig
    for key in detail["loc"][:-1]:
        field = section.model_fields.get(key)
        section = field.annotation if field else section
    before = "".join(f"{key}." for key in detail["loc"][:-1])
    names = getattr(section, "model_fields", ())
    return field_problem(detail, [f"{before}{name}" for name in names], f"{where}.")
