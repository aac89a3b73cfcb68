"""The overlay of each algorithm: it loads, and it is short. That it trains: tests/system/test_overlay_steps.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from asyncrl.config.methods import KINDS, methods
from asyncrl.config.overlays import FOLDERS, shipped_overlays
from asyncrl.config.schema import RunConfig
from asyncrl.demo.prepare import GRPO
from tests.rigs.tiny import ROOT

OVERLAYS = shipped_overlays("algorithms")
OF_TURNS = [name for name, method in methods("advantage").items() if "turns" in method.needs]
"""Overlays of estimators that need an environment, by the same names."""
ENVIRONMENT = {"tools": ["calculator"], "workers": 8, "limits": {"tokens_per_turn": 4}}


def over_the_demo(name: str, overlay: str) -> RunConfig:
    """With an environment where the overlay needs one."""
    environment = [f"environment.{key}={value}" for key, value in ENVIRONMENT.items()] if name in OF_TURNS else []
    return load_config(GRPO, [*environment, overlay])


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_is_short_says_what_it_is_and_loads_over_the_demo(name: str) -> None:
    first, *lines = OVERLAYS[name].read_text().splitlines()
    assert first.startswith("# ")
    assert 2 <= len(lines) <= 10
    config = over_the_demo(name, name)
    others = [chosen.name for chosen in config.algorithm.chosen_methods]
    assert config.algorithm.adv_estimator in others
    assert over_the_demo(name, str(OVERLAYS[name])) == config


def test_every_method_has_an_overlay_that_uses_it() -> None:
    algorithms = [over_the_demo(name, name).algorithm for name in OVERLAYS]
    used = {method.name for algorithm in algorithms for method in algorithm.chosen_methods}
    used |= {name for algorithm in algorithms for name in algorithm.filters}
    there = {name for kind in KINDS for name in methods(kind)}
    assert there - used == set()


def test_they_are_where_a_clone_is_looked_through_and_in_the_package() -> None:
    for kind, folder in FOLDERS.items():
        assert (ROOT / "configs" / kind).resolve() == folder
        assert Path("asyncrl") / kind / "overlays" == folder.relative_to(ROOT)
    assert not OVERLAYS.keys() & shipped_overlays("tasks").keys()
