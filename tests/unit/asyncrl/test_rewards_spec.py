"""Mistakes in `reward.functions` are found before anything starts, and say how to fix them."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.config.sections import RewardConfig, RewardFunctionConfig
from asyncrl.errors import UserError
from asyncrl.rewards.builtin import BUILTIN_REWARDS
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.scorer import RewardScorer
from asyncrl.rewards.spec import call_reward, check_call, check_rewards, hidden_columns, load_reward
from tests.rigs.tiny import ROOT


def config_of(function: str, **kwargs: Any) -> RewardConfig:
    functions = (RewardFunctionConfig(function=function, kwargs=kwargs),)
    return RewardConfig(functions=functions, workers=1, timeout_s=15, memory_limit_mib=2048)


async def load_in_workers(config: RewardConfig) -> None:
    pool = RewardScorer(config)
    await pool.start()
    await pool.close()


@pytest.fixture
def rewards_file(tmp_path: Path) -> Path:
    file = tmp_path / "my_rewards.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from my_constants import bonus\n"
        "def length(sample, scale=1.0): return len(sample.completion) * scale + bonus\n"
        "import dataclasses\n"
        "@dataclasses.dataclass\n"
        "class Scale: by: float = 1.0  # dataclasses look the module up under postponed annotations\n"
        "made = lambda sample: 2\n"
    )
    (tmp_path / "my_constants.py").write_text("bonus = 0.5\n")
    return file


def test_functions_are_loaded_by_name_and_by_path(rewards_file: Path):
    sample = RewardSample(completion="abc", answer="abc")
    assert load_reward("exact_match")(sample) == 1
    assert load_reward(f"{rewards_file}:length")(sample, scale=2) == 6.5
    assert load_reward(f"{rewards_file}:made")(sample) == 2


@pytest.fixture
def rewards_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of an installed package whose module imports its neighbour."""
    folder = tmp_path / "site" / "prizes"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "random.py").write_text("from .numbers_of_it import bonus\ndef lucky(sample): return bonus\n")
    (folder / "numbers_of_it.py").write_text("bonus = 7\n")
    (folder / "compiled.so").touch()
    monkeypatch.syspath_prepend(folder.parent)
    return "prizes"


def test_functions_are_loaded_from_an_installed_package_which_shadows_nothing(rewards_package: str):
    assert load_reward(f"{rewards_package}.random:lucky")(RewardSample(completion="")) == 7
    assert not any(place.endswith(rewards_package) for place in sys.path), "the package has a module `random`"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("prizes.rando:lucky", "no module prizes.rando. Did you mean 'random'\\? A file .* path/to/file.py:lucky"),
        ("prizes.random:luck", "random.py has no function 'luck'. Did you mean 'lucky'\\?"),
        ("prizes:lucky", "prizes is a package: name the module in it that has 'lucky'"),
        ("prises.random:lucky", "no module prises.random. A file"),
        ("tests.unit.asyncrl:f", "is a package"),
        ("_struct:unpack", "_struct is no Python source"),
    ],
)
def test_a_wrong_module_is_refused_with_the_fix(rewards_package: str, function: str, message: str):
    for check in (lambda: check_rewards(config_of(function)), lambda: load_reward(function)):
        with pytest.raises(UserError, match=message):
            check()


def test_a_module_in_the_working_directory_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "not_installed.py").write_text("def good(sample): return 1\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("import nothing_there\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"named by its path: not_installed\.py:good"):
        load_reward("not_installed:good")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"a package of it cannot be imported: .*nothing_there"):
        load_reward("broken.rewards:good")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("exact_mach", "is 'exact_mach', which is unknown. Did you mean 'exact_match'\\?"),
        ("{dir}/my_reward.py:length", "there is no file .*did you mean .*my_rewards.py"),
        ("{file}:lenght", "no function 'lenght'. Did you mean 'length'\\?"),
    ],
)
def test_a_wrong_function_is_refused_with_the_fix(rewards_file: Path, function: str, message: str):
    function = function.format(dir=rewards_file.parent, file=rewards_file)
    for check in (lambda: check_rewards(config_of(function)), lambda: load_reward(function)):
        with pytest.raises(UserError, match=message):
            check()


@pytest.mark.parametrize(
    ("function", "kwargs", "message"),
    [
        ("number_match", {"tolerence": 1}, "unexpected keyword argument 'tolerence'. Did you mean 'tolerance'"),
        ("regex_match", {}, r"missing a required (keyword-only )?argument: 'pattern'"),
    ],
)
def test_wrong_kwargs_of_a_builtin_are_refused(function: str, kwargs: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        check_rewards(config_of(function, **kwargs))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def reward(sample):\n    return (\n", r"cannot be imported: SyntaxError: .* \(broken.py:2\)"),
        ("import os\nimport no_such_package\ndef reward(s): return 1\n", r"no_such_package.*broken.py:2"),
        ("def reward(sample): return 1\nraise SystemExit(3)\n", r"SystemExit: 3 \(broken.py:2\)"),
        ("def reward(sample): return 1\nimport os\nos._exit(5)\n", "exited with code 5"),
        ("reward = 3\n", "reward in .*broken.py is int, not a function"),
        ("async def reward(sample): return 1.0\n", "reward in .*broken.py is async"),
        ("def reward(sample, *, needed): return 1\n", r"missing a required (keyword-only )?argument: 'needed'"),
        ("x = bytearray(10**10)\ndef reward(s): return 1\n", "MemoryError.*raise reward.memory_limit_mib"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_refused_at_start(tmp_path: Path, source: str, message: str):
    file = tmp_path / "broken.py"
    file.write_text(source)
    with pytest.raises(UserError, match=message):
        asyncio.run(load_in_workers(config_of(f"{file}:reward")))


def test_the_static_check_does_not_run_user_files(tmp_path: Path):
    file = tmp_path / "loud.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\ndef reward(sample): return 1\n")
    check_rewards(config_of(f"{file}:reward"))
    assert not (tmp_path / "ran").exists()


PAGE = (ROOT / "docs" / "rewards.md").read_text()


@pytest.mark.parametrize("block", re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S))
def test_the_documentations_snippets_are_accepted(block: str):
    check_rewards(RewardConfig.model_validate(yaml.safe_load(block)["reward"]))


def test_the_documentation_names_all_that_is_built_in():
    assert {name for name in BUILTIN_REWARDS if f"`{name}`" not in PAGE} == set()


TRL = """
from my_constants import bonus as imported
def wants(completions, **kwargs): return [float(text == "RIGHT") for text in completions]
def answers(completions, answer): return [float(one == "4") for one in answer]
def shown(prompts, completions, images): return [float(len(images[0])) + len(prompts[0])]
def few(completions, level): return [1.0]
def plain(sample): return 1.0
def graded(completions, solution, score): return list(score)
wrapped = wants
"""


def test_the_lists_of_trl_are_those_of_the_policy_whatever_columns_are_called(tmp_path: Path) -> None:
    (tmp_path / "trl.py").write_text(TRL)
    (tmp_path / "my_constants.py").write_text("bonus = 0.5")
    columns = {"completions": "RIGHT", "prompts": "zzz", "answer": "5", "images": ["x"] * 9, "level": 3}
    sample = RewardSample("wrong", prompt="q", answer="4", columns=columns, images=[b"png"])
    for name, expected in (("wants", 0.0), ("answers", 1.0), ("shown", 2.0)):
        assert call_reward(load_reward(f"{tmp_path}/trl.py:{name}"), [sample], {}) == [expected]


@pytest.mark.parametrize(
    ("entry", "columns", "hidden"),
    [
        ({"function": "wants"}, "completions prompts level", ["completions", "prompts"]),
        ({"function": "answers"}, "answer images", ["answer"]),
        ({"function": "shown"}, "images prompts answer completions", ["completions", "prompts", "images"]),
        ({"function": "few"}, "prompts images answer level", []),
        ({"function": "wants", "kwargs": {"level": 1}}, "level other", ["level"]),
        ({"function": "graded", "shapes": "sum"}, "score solution", ["score"]),
        ({"function": "plain"}, "completions answer", []),
        ({"function": "wrapped"}, "completions level", ["completions"]),
        ({"function": "imported"}, "level", []),
    ],
)
def test_a_column_with_the_name_of_a_list_is_named_before_the_run(
    tmp_path: Path, entry: dict[str, Any], columns: str, hidden: list[str]
) -> None:
    """The user's file is read, not run: the module that it imports is not there."""
    (tmp_path / "trl.py").write_text(TRL)
    first = {"function": "exact_match"}
    config = RewardConfig.model_validate(
        {"functions": [first, {**entry, "name": "x", "function": f"{tmp_path}/trl.py:{entry['function']}"}]}
    )
    notes = list(hidden_columns(config, columns.split()))
    assert [re.match(r"column '(\w+)' does not reach the reward", note)[1] for note in notes] == hidden


@pytest.mark.parametrize("name", ["completions", "prompts", "images", "answer"])
def test_settings_of_a_reward_do_not_replace_the_lists_of_trl(name: str) -> None:
    def wants(completions: list[str], **kwargs: Any) -> list[float]:
        return []

    with pytest.raises(UserError, match=f"has the kwargs {name}, which would replace "):
        check_call(wants, "wants", {name: ["RIGHT"]})
