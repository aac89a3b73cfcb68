"""The overlay of each algorithm: it loads, and it is short. That it trains: tests/system/test_overlay_steps.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from asyncrl.config.installed_methods import methods
from asyncrl.config.load import dump_config, load_config, shipped_overlays
from asyncrl.config.method import BY_SECTION, KINDS
from asyncrl.config.methods import METHODS
from asyncrl.config.schema import RunConfig
from asyncrl.demo.prepare import GRPO
from tests.rigs.tiny import ROOT

OVERLAYS = shipped_overlays("algorithms")
OF_TURNS = [name for name, method in methods("advantage").items() if "turns" in method.needs]
"""Overlays of estimators that need an environment, by the same names."""
OF_TEACHERS = [name for name, method in methods("advantage").items() if "reference" in method.needs]
"""Overlays of estimators that need a reference policy of another path, by the same names."""
ENVIRONMENT = {"name": "tests/rigs/lamp.py:Lamp", "workers": 8, "limits": {"tokens_per_turn": 4}}


def over_the_demo(name: str, overlay: str) -> RunConfig:
    """With an environment or a teacher where the overlay needs one."""
    environment = [f"environment.{key}={value}" for key, value in ENVIRONMENT.items()] if name in OF_TURNS else []
    teacher = ["reference.path=models/teacher"] if name in OF_TEACHERS else []
    return load_config(GRPO, [*environment, *teacher, overlay])


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_is_short_says_what_it_is_and_loads_over_the_demo(name: str) -> None:
    first, *lines = OVERLAYS[name].read_text().splitlines()
    assert first.startswith("# ")
    assert 2 <= len(lines) <= 10
    config = over_the_demo(name, name)
    others = [chosen.name for chosen in config.algorithm.chosen_methods]
    assert config.algorithm.adv_estimator in others
    given = yaml.safe_load(OVERLAYS[name].read_text())["algorithm"]
    assert [key for key in given if not hasattr(config.algorithm, key)] == [], "sections that choose nothing"
    assert over_the_demo(name, str(OVERLAYS[name])) == config


def test_a_word_on_a_runs_own_file_is_that_method_and_nothing_of_the_last_one(tmp_path: Path) -> None:
    """Each method over the file of the one before it in the alphabet; all pairs were compared once."""
    names = [name for name in OVERLAYS if name not in (*OF_TURNS, *OF_TEACHERS)]
    file = tmp_path / "config.yaml"
    for before, name in zip([names[-1], *names], names, strict=False):
        file.write_text(dump_config(load_config(GRPO, [before])))
        found, expected = (load_config(path, [name]).model_dump(exclude={"replaced"}) for path in (file, GRPO))
        assert found == expected, (before, name)


@pytest.mark.parametrize(
    ("words", "low", "high", "aggregation"),
    [
        (["dapo", "gspo"], 3e-4, 4e-4, "seq-mean-token-mean"),
        (["gspo", "dapo"], 0.2, 0.28, "token-mean"),
        (["dapo", "gspo", "algorithm.clip_ratio_low=0.1"], 0.1, 4e-4, "seq-mean-token-mean"),
        (["algorithm.clip_ratio_low=0.1", "gspo"], 0.1, 4e-4, "seq-mean-token-mean"),
        (["dapo", "algorithm.policy_loss=gspo"], 3e-4, 4e-4, "seq-mean-token-mean"),
    ],
)
def test_a_later_method_brings_its_own_clip(words: list[str], low: float, high: float, aggregation: str) -> None:
    algorithm = load_config(GRPO, words).algorithm
    assert (algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.loss_agg_mode) == (low, high, aggregation)


def test_every_method_has_an_overlay_that_uses_it() -> None:
    algorithms = [over_the_demo(name, name).algorithm for name in OVERLAYS]
    used = {method.name for algorithm in algorithms for method in algorithm.chosen_methods}
    used |= {name for algorithm in algorithms for name in algorithm.filters}
    there = {name for kind in KINDS if kind not in BY_SECTION for name in methods(kind)}
    assert there - used == set()


def test_they_are_where_a_clone_is_looked_through_and_in_the_package() -> None:
    assert METHODS.overlays == (ROOT / "configs" / "algorithms").resolve()
    assert not OVERLAYS.keys() & shipped_overlays("tasks").keys()
