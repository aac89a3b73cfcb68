"""Rows of the prompt sources: an entry of the entry point group `asyncrl.methods`. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.method import Method, MethodSet
from asyncrl_plugins.curricula.settings import GresoConfig, PassRateConfig

if TYPE_CHECKING:
    from asyncrl.config.schema import RunConfig


def greso_problems(config: RunConfig) -> Iterator[str]:
    yield from _component_problems(config, "greso", config.algorithm.settings_of(GresoConfig).component)
    if config.batch.group_size < 2:
        yield (
            f"batch.group_size is {config.batch.group_size}: no group has spread, which algorithm.greso goes by. Set "
            "batch.group_size=8"
        )
    if config.sampled_per_group < config.batch.group_size:
        yield (
            "algorithm.greso is chosen, which passes over prompts without a right completion: those that have the most "
            f"to learn from what {' and '.join(config.algorithm.inserting_hooks)} inserts. Leave one of them out"
        )


def pass_rate_problems(config: RunConfig) -> Iterator[str]:
    return _component_problems(config, "pass_rate", config.algorithm.settings_of(PassRateConfig).component)


def _component_problems(config: RunConfig, name: str, component: str) -> Iterator[str]:
    components = config.reward.component_names
    if component and component not in components:
        there = f"the components of the reward are {', '.join(components)}" if components else "there are none"
        yield f"algorithm.{name}.component is {component!r}, but {there} (reward.functions)"


METHODS = MethodSet(
    prompt_sources={
        "greso": Method(
            "asyncrl_plugins.curricula.sources:Greso",
            formula="after z groups without spread in a row, a row is passed over with probability 1 - max(p^z, 0.01)",
            paper="2506.02177",
            settings=GresoConfig,
            problems=greso_problems,
        ),
        "pass_rate": Method(
            "asyncrl_plugins.curricula.sources:PassRate",
            formula="a row is passed over with probability (1 - floor) |rate - target| / max(target, 1 - target)",
            settings=PassRateConfig,
            problems=pass_rate_problems,
        ),
    },
    overlays=Path(__file__).parent / "overlays",
)
