"""Lines of the tables, each with what the other system documents: in `meanings/`, their settings => ours.

`-` means that nothing is set as theirs changes nothing, `!` that the first key is not translated. Sources: verl's
`trainer/config` and `core_algos.py`, EasyR1's and RLLaVA's configuration classes and losses, TRL 1.16's `GRPOConfig`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import yaml_text
from asyncrl_plugins.import_config import computed
from asyncrl_plugins.import_config.table import FRAMEWORKS, Given, Translation, table_of, translate

SHORT = {"A.": "actor_rollout_ref.actor.", "R.": "actor_rollout_ref.rollout.", "M.": "actor_rollout_ref.model."}
SHORT |= {"C.": "algorithm.rollout_correction.", "W.": "worker.actor.", "V.": "worker.rollout."}

FILES = Path(__file__).parent / "meanings"
LINES = [(name, line) for name in FRAMEWORKS for line in (FILES / f"{name}.txt").read_text().splitlines()]


def settings_in(text: str) -> dict[str, Any]:
    found = {}
    for part in text.split(" & "):
        key, _, value = part.partition("=")
        long = next((long + key.removeprefix(short) for short, long in SHORT.items() if key.startswith(short)), key)
        found[long] = yaml_text.parse(value, "value")[0]
    return found


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for key, value in leaves.items():
        *above, last = key.split(".")
        section = config
        for part in above:
            section = section.setdefault(part, {})
        section[last] = value
    return config


def translated(framework: str, theirs: dict[str, Any]) -> Translation:
    return translate(nested(theirs), table_of(framework))


@pytest.mark.parametrize(("framework", "line"), LINES)
def test_a_setting_means_here_what_it_means_there(framework: str, line: str) -> None:
    left, _, right = line.partition(" => ")
    theirs = settings_in(left)
    done = translated(framework, theirs)
    if right == "!":
        lost = {key.key: key for key in done.not_translated}
        assert next(iter(theirs)) in lost
        assert lost[next(iter(theirs))].note
    elif right == "-":
        assert {key.key for key in done.left_out} == theirs.keys()
    else:
        ours = settings_in(right)
        assert {name: done.settings.get(name) for name in ours} == ours
        assert done.not_translated == []


@pytest.mark.parametrize(("criterion", "most"), [("seq_max_k2", 0.021), ("seq_max_k3", 0.021), ("seq_max_k3", 3.0)])
def test_the_largest_divergence_of_a_row_bounds_its_ratios(criterion: str, most: float) -> None:
    """A row is kept where (log r)^2 / 2, or r - 1 - log r, is at most the threshold at each token."""
    settings = computed.rejections(criterion, most)
    assert settings is not None
    [mask] = settings["algorithm.correction.masks"]
    assert mask["kind"] == "veto"
    for x in (each / 100 for each in range(-500, 500)):
        divergence = x * x / 2 if criterion.endswith("k2") else math.exp(x) - 1 - x
        assert (mask["lower"] <= math.exp(x) <= mask["upper"]) == (divergence <= most), x


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_line_of_a_table_has_its_meaning_among_these(framework: str) -> None:
    table, seen = table_of(framework), set[tuple[str, int]]()
    for _, line in (one for one in LINES if one[0] == framework):
        given = Given(settings_in(line.partition(" => ")[0]), table.defaults)
        for key in {*given.leaves, *table.defaults} & table.names.keys():
            number = next((i for i, row in enumerate(table.names[key]) if row.holds(given)), None)
            if number is not None:
                seen.add((key, number))
    rows = {(key, number) for key, rows in table.names.items() for number in range(len(rows))}
    assert sorted(rows - seen) == []
    untold = table.names.keys() - {
        key for name, line in LINES if name == framework for key in settings_in(line.partition(" => ")[0])
    }
    assert sorted(untold) == []


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_default_of_theirs_is_one_of_the_table_and_gives_way_to_the_file(framework: str) -> None:
    table = table_of(framework)
    nothing = translate({}, table)
    assert nothing.translated == nothing.not_translated == []
    assert {key.key for key in nothing.defaults} <= table.defaults.keys()
    for key in nothing.defaults:
        again = translated(framework, {key.key: key.value})
        assert again.settings == nothing.settings, key.key


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_lines_without_a_translation_say_so(framework: str) -> None:
    """`as_here`: that value alone needs nothing. `left_out`: nothing is set. `not_translated`: the note says what."""
    table = table_of(framework)
    for key, (value, note) in table.as_here.items():
        assert [one.key for one in translated(framework, {key: value}).left_out] == [key]
        [other] = translated(framework, {key: "something else"}).not_translated
        assert other.note == note
    for part in ("left_out", "not_translated"):
        for pattern, note in getattr(table, part).items():
            [found] = getattr(translated(framework, {pattern.replace("*", "x"): "x"}), part)
            assert (found.note, found.settings) == (note, {})
