"""The `reward` section: the functions that score a completion, and the limits of one scoring."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from asyncrl.config.section import Section


class RewardFunctionConfig(Section):
    function: str
    """Built-in name (see asyncrl/rewards/builtin.py) or `file.py:function`."""
    weight: float = 1.0
    """Weight of this component in the sum."""
    name: str = ""
    """Name of the curve; empty means the function's own name."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments of the function."""


class RewardConfig(Section):
    functions: tuple[RewardFunctionConfig, ...]
    """Components; their weighted sum is the reward."""
    accuracy: str = ""
    """Component reported as held-out accuracy; empty means the first."""
    timeout_s: float = Field(default=15.0, gt=0)
    """Longest time for all components of one sample; then its worker is killed and the trajectory is `timed_out`."""
    workers: int = Field(default=2, gt=0)
    """Worker processes."""
    memory_limit_mib: int = Field(default=2048, gt=0)
    """Address space of one worker (each process that it starts gets the same)."""

    @model_validator(mode="after")
    def _known_accuracy(self) -> RewardConfig:
        names = self.component_names
        if not names:
            raise ValueError("reward.functions is empty: name at least one, such as {function: exact_match}")
        if len(set(names)) != len(names):
            raise ValueError(f"two reward components have one name: {names}. Set `name` on one of them")
        if self.accuracy and self.accuracy not in names:
            raise ValueError(f"reward.accuracy is {self.accuracy!r}, but the components are {names}")
        return self

    @property
    def component_names(self) -> tuple[str, ...]:
        return tuple(component_name(function) for function in self.functions)

    @property
    def accuracy_component(self) -> str:
        return self.accuracy or component_name(self.functions[0])


def component_name(function: RewardFunctionConfig) -> str:
    """The curve's name: the given one, or what stands after the last `:` of the function."""
    return function.name or function.function.rsplit(":", 1)[-1]
