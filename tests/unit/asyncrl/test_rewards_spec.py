"""Mistakes in `reward.functions` are found before anything starts, and say how to mend them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.sections import RewardConfig, RewardFunctionConfig
from asyncrl.errors import UserError
from asyncrl.rewards.pool import RewardPool
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.spec import check_rewards, load_reward


def config_of(function: str, **kwargs: Any) -> RewardConfig:
    functions = (RewardFunctionConfig(function=function, kwargs=kwargs),)
    return RewardConfig(functions=functions, workers=1, timeout_s=15, memory_limit_mib=2048)


async def load_in_workers(config: RewardConfig) -> None:
    pool = RewardPool(config)
    await pool.start()
    await pool.close()


@pytest.fixture
def rewards_file(tmp_path: Path) -> Path:
    file = tmp_path / "my_rewards.py"
    file.write_text(
        "from my_constants import bonus\n"
        "def length(sample, scale=1.0): return len(sample.completion) * scale + bonus\n"
        "async def slow(sample): return 1.0\n"
        "constant = 3\n"
        "made = lambda sample: 2\n"
    )
    (tmp_path / "my_constants.py").write_text("bonus = 0.5\n")
    return file


def test_functions_are_loaded_by_name_and_by_path(rewards_file: Path):
    sample = RewardSample(completion="abc", answer="abc")
    assert load_reward("exact_match")(sample) == 1
    assert load_reward(f"{rewards_file}:length")(sample, scale=2) == 6.5
    assert load_reward(f"{rewards_file}:made")(sample) == 2


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("exact_mach", "no built-in reward 'exact_mach'. Did you mean 'exact_match'\\?"),
        ("{dir}/my_reward.py:length", "does not exist .* Did you mean|does not exist.*'my_rewards.py'"),
        ("{dir}/no/such/folder.py:length", "folder.py does not exist"),
        ("{file}", "names a file only. Write .*my_rewards.py:function_name"),
        ("{file}:lenght", "no function 'lenght'. Did you mean 'length'\\?"),
        ("{file}:slow", "slow in reward file .* is async"),
        ("my_rewards.txt:length", "not of the form path/file.py:function"),
    ],
)
def test_a_wrong_function_is_refused_with_the_fix(rewards_file: Path, function: str, message: str):
    function = function.format(dir=rewards_file.parent, file=rewards_file)
    with pytest.raises(UserError, match=message):
        check_rewards(config_of(function))
    with pytest.raises(UserError, match=message):
        load_reward(function)


@pytest.mark.parametrize(
    ("function", "kwargs", "message"),
    [
        ("number_match", {"tolerence": 1}, "unexpected keyword argument 'tolerence'. Did you mean 'tolerance'"),
        ("regex_match", {}, "missing a required argument: 'pattern'"),
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
        ("reward = 3\n", "reward in reward file .*broken.py is int, not a function"),
        ("def reward(sample, *, needed): return 1\n", "missing a required argument: 'needed'"),
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
    with pytest.raises(UserError, match="reward kwargs"):
        asyncio.run(load_in_workers(config_of("regex_match", pattern=object())))


def test_the_worker_starts_without_heavy_imports():
    heavy = "torch", "numpy", "pydantic", "asyncio", "transformers", "datasets"
    code = f"import sys, asyncrl.rewards.worker; sys.exit(str(set({heavy}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr.strip() == "set()"
