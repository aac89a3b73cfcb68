"""Sections of the configuration with a sub-section for each chosen part that has settings of its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from pydantic import ConfigDict, ValidationError, create_model, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from asyncrl.config.sections import Section

S = TypeVar("S", bound=Section)


class OpenSection(Section):
    """A section such as `algorithm`: `algorithm.gae` exists only where `algorithm.adv_estimator` is gae.

    The sub-sections are typed, frozen and checked as all others are. Any other unknown key is refused.
    """

    model_config = ConfigDict(extra="allow")

    @classmethod
    def chosen_sections(cls, given: Mapping[str, Any]) -> Mapping[str, type[Section]]:
        """Sub-sections by name that exist with these values, which have not been checked yet."""
        raise NotImplementedError

    @classmethod
    def possible_sections(cls) -> Mapping[str, type[Section]]:
        """Sub-sections by name of all parts that are installed, for suggestions and the reference page."""
        raise NotImplementedError

    @classmethod
    def choice_of(cls, section: str, given: Mapping[str, Any]) -> str:
        """Choice with which the sub-section exists, and the present one: `algorithm.adv_estimator=gae (it is grpo)`."""
        return section

    @model_validator(mode="before")
    @classmethod
    def _check_sub_sections(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        fields = {key: value for key, value in given.items() if key in cls.model_fields}
        others = {key: value for key, value in given.items() if key not in cls.model_fields}
        chosen = cls.chosen_sections(given)
        unchosen = [key for key in others if key in cls.possible_sections() and key not in chosen]
        if unchosen:
            raise ValidationError.from_exception_data(cls.__name__, [cls._unchosen(key, given) for key in unchosen])
        return {**fields, **dict(_shell(cls.__name__, tuple(chosen.items())).model_validate(others))}

    @classmethod
    def _unchosen(cls, key: str, given: Mapping[str, Any]) -> InitErrorDetails:
        problem = PydanticCustomError(
            "unchosen_section", "holds settings of {choice}, which is not chosen", {"choice": cls.choice_of(key, given)}
        )
        return InitErrorDetails(type=problem, loc=(key,), input=given[key])

    def settings_of(self, section: type[S]) -> S:
        """The chosen part's settings. Raises LookupError where no chosen part has such a section."""
        for value in (self.model_extra or {}).values():
            if isinstance(value, section):
                return value
        raise LookupError(f"no chosen part of this section has settings of the class {section.__name__}")


@cache
def _shell(name: str, sections: tuple[tuple[str, type[Section]], ...]) -> type[Section]:
    """A section that has these sub-sections, and no other key."""
    return create_model(name, __base__=Section, **{key: (each, each()) for key, each in sections})  # pyright: ignore[reportCallIssue, reportArgumentType]
