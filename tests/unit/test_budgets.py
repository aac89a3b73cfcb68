"""Budgets of code, configuration and documentation: what grows past its budget makes room first."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CORE = ("asyncrl", "rollout_server", "learner", "protocol")
CORE_LINES, CORE_FILES = 43_000, 290
PACKAGE_LINES = 23_000
"""Lines of `asyncrl/`, the largest of the four."""
DOCUMENTATION_WORDS = 40_000
"""README.md, CHANGELOG.md and the pages of docs/, generated ones included; without lab log and decision records."""
DECISIONS_WORDS, DECISION_WORDS = 15_000, 550
RESULTS_WORDS = 1_500
README_WORDS, README_CHARACTERS = 700, 100
CONFIGURATION_KEYS = 180
"""Keys of the core in docs/configuration.md, without settings of single methods."""
RELEASE_LINES, LINE_CHARACTERS = 60, 120
"""One screen: the section of a release in CHANGELOG.md."""


def words(path: Path) -> int:
    return len(path.read_text().split())


def core_files(*packages: str) -> list[Path]:
    return [file for package in packages or CORE for file in (ROOT / package).rglob("*.py")]


def test_the_core_is_small_enough_to_hold_in_the_head() -> None:
    assert len(core_files()) <= CORE_FILES
    assert sum(file.read_text().count("\n") for file in core_files()) <= CORE_LINES
    assert sum(file.read_text().count("\n") for file in core_files("asyncrl")) <= PACKAGE_LINES


def test_a_class_name_has_one_meaning_in_the_core() -> None:
    names = Counter(
        name for file in core_files() for name in re.findall(r"^class (\w+)", file.read_text(), re.MULTILINE)
    )
    assert {name: count for name, count in names.items() if count > 1} == {}


def test_the_documentation_is_short_enough_to_read() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.glob("*.md")]
    counts = {page.name: words(page) for page in pages}
    assert sum(counts.values()) <= DOCUMENTATION_WORDS, sorted(counts.items(), key=lambda one: -one[1])


def test_decision_records_are_short_enough_to_read() -> None:
    assert sum(map(words, (DOCS / "decisions").glob("*.md"))) <= DECISIONS_WORDS


@pytest.mark.parametrize("record", sorted((DOCS / "decisions").glob("*.md")), ids=lambda record: record.stem)
def test_a_decision_record_is_one_screen(record: Path) -> None:
    limit = 2 * DECISION_WORDS if record.stem.startswith("028") else DECISION_WORDS  # a table, one line per trial
    assert words(record) <= limit


def test_the_page_of_results_has_what_users_ask_for() -> None:
    assert words(DOCS / "results.md") <= RESULTS_WORDS


def test_the_readme_is_one_page_of_short_lines() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert words(ROOT / "README.md") <= README_WORDS
    assert max(map(len, lines)) <= README_CHARACTERS, max(lines, key=len)


def test_a_release_is_one_screen_of_the_changelog() -> None:
    releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    assert releases
    for release in releases:
        lines = release.splitlines()
        assert len(lines) <= RELEASE_LINES, lines[0]
        assert max(map(len, lines)) <= LINE_CHARACTERS, max(lines, key=len)


def test_a_user_meets_few_keys() -> None:
    assert (DOCS / "configuration.md").read_text().count("\n| `") <= CONFIGURATION_KEYS


# --- parameters that are the whole configuration -----------------------------------------------------------------

WHOLE_CONFIGURATIONS = 70
"""Parameters of the core that are the whole configuration of a run; every other part takes what it reads."""
COMPOSITION = (
    *("asyncrl/config/", "asyncrl/checks/", "asyncrl/launch/", "asyncrl/demo/", "asyncrl/service_entry.py"),
    "asyncrl/devices/device.py",  # `resolve_dtype` gives a configuration back
    "asyncrl/memory_plan/",  # plans configurations that differ in a key
    *("learner/__main__.py", "learner/service.py", "learner/ranks/rank_variables.py"),
    *("learner/loop/trainer.py", "learner/loop/follower.py", "learner/loop/resume.py"),
    *("rollout_server/__main__.py", "rollout_server/service.py", "rollout_server/engines/"),
)
"""Files and rooms that put a run together, or that judge the configuration as a whole."""


def test_only_composition_takes_the_whole_configuration() -> None:
    found = Counter[str]()
    for file in core_files():
        if taken := len(re.findall(r"config: RunConfig\b", file.read_text())):
            found[file.relative_to(ROOT).as_posix()] = taken
    assert [name for name in found if not name.startswith(COMPOSITION)] == []
    assert found.total() <= WHOLE_CONFIGURATIONS, found.most_common()
