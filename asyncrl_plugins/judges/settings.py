"""Settings in the `kwargs` of a reward's entry."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from asyncrl.config.sections import RewardFunctionConfig, Section, component_name
from asyncrl.errors import UserError, field_problem

S = TypeVar("S", bound=Section)


def settings_of(component: RewardFunctionConfig, kind: type[S]) -> S:
    """Check a component's kwargs. Raises UserError that names each wrong one."""
    name = f"reward {component_name(component)}"
    if component.shapes:
        raise UserError(f"{name}: {component.function} shapes no other component. Remove `shapes`")
    try:
        return kind.model_validate(component.kwargs)
    except ValidationError as error:
        problems = "; ".join(field_problem(detail, kind.model_fields, "kwargs.") for detail in error.errors())
        raise UserError(f"{name}: {problems}") from None
