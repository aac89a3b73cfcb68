"""Functions of a notebook as a file: it says what they say, alone."""

from __future__ import annotations

import linecache
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from asyncrl.errors import UserError
from asyncrl.rewards.builtin import exact_match
from asyncrl_plugins.python_api.source import place_of

CELLS = '''
from __future__ import annotations
import functools, math, re
import xml.etree.ElementTree
import os.path as paths
from collections import Counter as Tally
from enum import Enum
from pathlib import Path
from typing import Literal, NamedTuple

NUMBER = re.compile(r"(\\d+)")
WEIGHTS = {"right": 1.0, "long": [0.5, -1]}
LIVE = open(paths.devnull)

def number_in(text):
    found = NUMBER.search(text)
    return int(found[1]) if found else None

same = number_in

class Score(dict):
    best = WEIGHTS["right"]
    def of(self, text, answer):
        return self.best * (same(text) == answer) + math.floor(Tally(text)["x"] / 2)

def reward(sample: Unknown):
    """Names of annotations are no names that it needs."""
    return Score().of(getattr(sample, "completion", sample), 7)

def doubled(sample):
    return 2 * reward(sample)

def makes(factor):
    def scaled(sample):
        return factor * reward(sample)
    return scaled

tripled = makes(3)

SCALE = 10

def round(number):
    return SCALE * number

@functools.lru_cache(maxsize=None)
def cached(text):
    return text.strip()

def logged(function):
    @functools.wraps(function)
    def inner(sample):
        return function(sample)
    return inner

class Mark(NamedTuple):
    value: float

class Kind(Enum):
    FULL = SCALE

@logged
def everything(sample, kind: Literal["a"] = "a"):
    node = xml.etree.ElementTree.fromstring("<a>1</a>")
    return Mark(round(int(node.text)) + Kind.FULL.value + len(cached(" 7 "))).value

def misspelt(sample):
    return nowhere(sample)

anonymous = lambda sample: 1.0

def reads_a_file(sample):
    return LIVE.read()
'''


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Names of cells that ran as `__main__`, with their source where IPython keeps it."""
    main = ModuleType("__main__")
    name = "<ipython-input-1>"
    linecache.cache[name] = (len(CELLS), None, list[str](CELLS.splitlines(keepends=True)), name)
    monkeypatch.setitem(sys.modules, "__main__", main)
    main.__file__ = name
    exec(compile(CELLS, name, "exec", dont_inherit=True), main.__dict__)
    return main


def loaded(place: str) -> Callable[..., Any]:
    file, _, name = place.rpartition(":")
    return runpy.run_path(file)[name]


@pytest.mark.parametrize(("name", "factor"), [("reward", 1), ("doubled", 2), ("tripled", 3)])
def test_source_says_what_the_function_says_with_all_that_it_names(
    cells: ModuleType, tmp_path: Path, name: str, factor: int
) -> None:
    function = getattr(cells, name)
    place = place_of(function, tmp_path)
    for text in ("7", "it is 7 xxxx", "8 xx", "none"):
        assert loaded(place)(text) == function(text)
    assert loaded(place)("7") == factor


def test_decorators_shadowed_names_submodules_and_classes_of_all_kinds_travel(
    cells: ModuleType, tmp_path: Path
) -> None:
    place = place_of(cells.everything, tmp_path)
    assert loaded(place)(None) == cells.everything(None) == 10 + 10 + 1
    assert "import Literal" in Path(place.rpartition(":")[0]).read_text()


def test_a_function_of_a_file_beside_the_script_travels_as_source(
    cells: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text("LIMIT = 3\n\n\ndef limited(number):\n    return min(number, LIMIT)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import beside  # pyright: ignore[reportMissingImports]

    code = "def capped(sample):\n    return limited(9)\n\n\ndef through(sample):\n    return beside.limited(9)\n"
    linecache.cache["<cell>"] = (len(code), None, list[str](code.splitlines(keepends=True)), "<cell>")
    vars(cells).update(limited=beside.limited, beside=beside)
    exec(compile(code, "<cell>", "exec"), vars(cells))
    place = place_of(cells.capped, tmp_path / "inputs")
    assert loaded(place)(None) == 3
    assert "beside" not in Path(place.rpartition(":")[0]).read_text()
    with pytest.raises(UserError, match="through reads the module beside, a file beside this script"):
        place_of(cells.through, tmp_path / "inputs")


def test_a_name_follows_the_source(cells: ModuleType, tmp_path: Path) -> None:
    """So that a resumed run with another function is found, and never meets the old one's file."""
    first = place_of(cells.reward, tmp_path)
    assert place_of(cells.reward, tmp_path) == first
    vars(cells)["WEIGHTS"] = {"right": 2.0}
    assert place_of(cells.reward, tmp_path) != first


def test_what_can_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_of(exact_match, tmp_path) == "asyncrl.rewards.builtin:exact_match"
    assert place_of("my.py:reward", tmp_path) == "my.py:reward"
    file = tmp_path / "own_reward.py"
    file.write_text("def reward(sample):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import own_reward  # pyright: ignore[reportMissingImports]

    assert place_of(own_reward.reward, tmp_path) == f"{file.resolve()}:reward"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "reads_a_file",
            "reads_a_file reads LIVE, which is TextIOWrapper of this process. Make it within",
        ),
        ("anonymous", "no name"),
        ("misspelt", "misspelt reads nowhere, which is not defined"),
    ],
)
def test_what_cannot_travel_is_refused_with_the_fix(cells: ModuleType, tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        place_of(getattr(cells, name), tmp_path)


def test_a_function_without_source_is_refused(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("def reward(sample): return 1.0", namespace)
    with pytest.raises(UserError, match=r"Write it into a file and give 'file.py:reward'"):
        place_of(namespace["reward"], tmp_path)
    with pytest.raises(UserError, match=r"is Pattern\. Give a function, a class"):
        place_of(re.compile("x"), tmp_path)
