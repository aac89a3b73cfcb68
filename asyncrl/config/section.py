"""The base of every section of the configuration."""

from __future__ import annotations

from typing import Any, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Frozen, without unknown keys or infinite numbers; the text below a field is its documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _read_as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """Accept an empty section (its defaults) and names with commas for a list of text; `true` is no number."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if value is None and isinstance(annotation, type) and issubclass(annotation, Section):
            return {}
        if isinstance(value, str) and get_origin(annotation) is tuple and annotation == tuple[str, ...]:
            return [name.strip() for name in value.split(",") if name.strip()]
        if isinstance(value, bool) and annotation in (int, float):
            raise PydanticCustomError("bool_as_number", "expected a number")
        return value
