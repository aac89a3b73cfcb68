"""Prompt sources: which rows are visited again, against hand-worked numbers and GRESO's vectors."""

from __future__ import annotations

import json

import pytest

from asyncrl.data.prompt_sources import DataOrder, PromptSource
from asyncrl_plugins.curricula.settings import GresoConfig, PassRateConfig
from asyncrl_plugins.curricula.sources import Greso, PassRate, greso_skip_probability
from tests.rigs.tiny import ROOT

VECTOR = json.loads((ROOT / "tests" / "rigs" / "vectors.json").read_text())["greso_skip_prob"]


def greso(num_rows: int = 10, *, per_step: int = 4, end: int | None = None, seed: int = 1) -> Greso:
    return Greso(GresoConfig(), DataOrder(num_rows, 1, shuffle=False), seed, accuracy="", per_step=per_step, end=end)


def test_skip_probabilities_of_greso() -> None:
    for z, expected in VECTOR["z"].items():
        assert greso_skip_probability(VECTOR["p"], int(z)) == pytest.approx(expected, abs=1e-12)


def test_greso_counts_the_groups_without_spread_in_a_row() -> None:
    source = greso()
    for z in (1, 2, 3):
        assert source.observe(0, [0, 0])["row 0"] == -z
        assert source.skip_probability(0) == pytest.approx(1 - source.state()["p_hard"] ** z)
    assert source.observe(10, [0, 1])["row 0"] == 0, "position 10 is row 0 in the second epoch"
    assert source.skip_probability(0) == 0
    assert source.observe(20, [1, 1])["row 0"] == 1, "easy"
    assert source.observe(1, [0.5]) == {}, "one score says nothing"
    assert source.skip_probability(1) == 0, "a row that was never seen is visited"


def test_gresos_probabilities_move_towards_their_targets_after_a_steps_worth_of_seen_rows() -> None:
    source = greso()
    for row in range(4):
        source.observe(row, [0, 0])
    assert source.state()["p_hard"] == 0.5, "the first visits of rows are not counted"
    for row in range(4):
        source.observe(10 + row, [1, 1] if row else [0, 1])
    state = source.state()
    assert state["p_easy"] == pytest.approx(0.49), "3 of 4 were easy: over the target of 1/12"
    assert state["p_hard"] == pytest.approx(0.51), "none was hard: below the target of 1/6"
    for position in range(1000):
        source.observe(position, [1, 1])
    assert source.state()["p_easy"] == pytest.approx(0.05)
    assert source.state()["p_hard"] == pytest.approx(0.95)


def test_rows_without_spread_are_passed_over_about_as_often_as_they_should_be_and_epochs_end() -> None:
    source = greso(1000, end=2000, per_step=10**6)
    assert source.next(10**6, 0) == list(range(2000))
    for row in range(1000):
        source.observe(row, [0, 0])
        source.observe(row, [0, 0])
    visited = source.next(10**6, 1000)
    assert len(visited) == pytest.approx(250, abs=50), "p^z = 0.25"
    assert visited == source.next(10**6, 1000), "a look changes nothing"
    assert visited[:3] == source.next(3, 1000)
    again = greso(1000, end=2000, per_step=10**6)
    again.restore(source.state())
    assert again.next(10**6, 1000) == visited
    assert again.state() == source.state()
    assert greso(1000, end=2000, seed=2).next(1, 2000) == []


def test_the_pass_rate_near_the_target_is_visited_most() -> None:
    source = PassRate(
        PassRateConfig(target=0.5, floor=0.1, memory=0.5), DataOrder(9, 1, shuffle=False), 1, accuracy="", per_step=1
    )
    source.observe(0, [0, 0])
    source.observe(1, [0, 1])
    source.observe(2, [1, 1])
    assert [source.skip_probability(row) for row in range(4)] == pytest.approx([0.9, 0, 0.9, 0])
    assert source.observe(9, [1, 1])["row 0"] == pytest.approx(0.5), "half of what was, half of what is"
    assert source.skip_probability(0) == 0


def test_without_a_curriculum_every_position_is_visited() -> None:
    assert PromptSource(5).next(9, 2) == [2, 3, 4]
    assert PromptSource().next(2, 7) == [7, 8]
    assert PromptSource(5).next(0, 2) == PromptSource(5).next(-3, 2) == []
