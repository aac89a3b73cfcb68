"""The environments under examples/: what their oracles get, that a start says everything, and `asyncrl env`."""

from __future__ import annotations

import asyncio
import importlib
import io
import random
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from asyncrl.algorithms.trajectories import Trajectories
from asyncrl.cli import main
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.environment import EnvironmentConfig
from asyncrl.environments.loading import LoadedEnvironment
from asyncrl_plugins.evaluation import play
from asyncrl_plugins.evaluation.environment_files import override
from asyncrl_plugins.evaluation.terminal import typed_turns
from tests.rigs.tiny import ROOT

pytest.importorskip("sklearn", reason="the scans of digits come with scikit-learn")
EXAMPLES = {
    "ZoomDigit": f"{ROOT}/examples/zoom_digit/environment.py:ZoomDigit",
    "GridLake": f"{ROOT}/examples/grid_lake/environment.py:GridLake",
    "Calc": f"{ROOT}/examples/calc/environment.py:Calc",
}


def opened(name: str, **config: Any) -> tuple[LoadedEnvironment, EnvironmentConfig]:
    section = override({"name": EXAMPLES[name], "config": config, "limits": {"turns": 8, "images": 9}}, [])
    return play.open_environment(section, unit=14), section


def episode(name: str, number: int, policy: str, **config: Any) -> tuple[play.Played, list[Any]]:
    """An episode and all that was shown of it."""
    loaded, section = opened(name, **config)
    start = play.start_of(loaded, play.make_row(loaded, number, "held_out"), seed=1)
    shown: list[Any] = []
    turns = play.policy_of(loaded, policy)(start, random.Random(number))
    look = lambda kind, part: shown.append((kind, part)) if kind in ("user", "tool") else None  # noqa: E731
    return asyncio.run(play.play(loaded, section, start, turns, look)), shown


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_oracle_gets_everything_and_a_start_gives_the_same_bytes_each_time(name: str) -> None:
    first, shown = episode(name, 3, "oracle")
    assert (first.end, sum(first.rewards), first.call_errors) == ("done", 1.0, 0)
    again, shown_again = episode(name, 3, "oracle")
    assert shown == shown_again
    assert first == again
    assert shown != episode(name, 4, "oracle")[1]
    assert any(isinstance(part, bytes) for _, part in shown)


def test_controls_take_the_way_to_the_answer_away() -> None:
    wrong, shown = episode("ZoomDigit", 3, "oracle", wrong_image=True)
    assert shown[0] == episode("ZoomDigit", 3, "oracle")[1][0]
    assert shown[1] != episode("ZoomDigit", 3, "oracle")[1][1]
    assert wrong.info["hit"]
    assert episode("ZoomDigit", 3, "oracle", tool=False)[1][1] == ("tool", "Error: crop is not available")
    assert episode("Calc", 3, "oracle", tool=False)[1][1] == ("tool", "Error: calc is not available")
    blind = [part for number in (3, 4) for _, part in episode("GridLake", number, "oracle", blind=True)[1]]
    assert len(set(blind)) == 1


def test_maps_are_solvable_in_one_part_only_and_the_random_policy_is_computed_exactly() -> None:
    loaded, _ = opened("GridLake")
    module = __import__("sys").modules[loaded.cls.__mro__[1].__module__]
    lakes = {split: {module.make_lake(n, split).digest for n in range(150)} for split in ("train", "held_out")}
    assert not lakes["train"] & lakes["held_out"]
    assert min(map(len, lakes.values())) > 140
    lake = module.Lake((0, 0), (0, 1), frozenset({(1, 0)}))
    assert lake.random_success(1) == 0.25
    assert lake.random_success(2) == 0.25 + 0.5 * 0.25, "up and left stay, down is a hole"


def test_turns_are_typed_as_they_are_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"code": "a\\nb"}\nfirst\\\nsecond\n'))
    assert list(typed_turns()) == ['{"code": "a\\nb"}', "first\nsecond"]


def test_the_command_plays_estimates_and_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lake = EXAMPLES["GridLake"]
    assert main(["env", "try", lake, "--policy", "oracle", "--seed", "2", "--unit", "14"]) == 0
    out = capsys.readouterr().out
    assert "[image 0: 56 x 56, about 16 tokens, " in out
    assert "end: done   reward 1 in " in out
    section = tmp_path / "run.yaml"
    section.write_text(f"environment:\n  name: {lake}\n  limits: {{turns: 3}}\n")
    assert main(["env", "baseline", str(section), "limits.turns=2", "--policy", "random", "--episodes", "20"]) == 0
    out = capsys.readouterr().out
    assert "GridLake, policy random, 20 episodes of train" in out
    assert "limit turns" in out
    rows = tmp_path / "rows.parquet"
    assert main(["env", "rows", lake, "--count", "3", "--split", "held_out", "--out", str(rows)]) == 0
    assert pq.read_table(rows)["lake"].to_pylist() == [0, 1, 2]
    assert "answer" not in pq.read_schema(rows).names, "an environment that judges alone needs none"
    assert main(["env", "rows", lake, "--out", str(tmp_path / "rows.jsonl")]) == 2
    assert "Name it rows.parquet" in capsys.readouterr().err
    assert main(["env", "try", lake, "--policy", "orcale"]) == 2
    assert "Did you mean 'oracle'?" in capsys.readouterr().err


def test_the_agent_demo_shows_what_it_demonstrates_and_a_control_trains_the_last_turn_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(f"{ROOT}/examples/zoom_digit")
    demo = importlib.import_module("demo")
    reading, looking = demo.warm_start_row(5, reads=True), demo.warm_start_row(5, reads=False)
    shown = episode("ZoomDigit", 5, "oracle")[1]
    assert len(shown) == 2
    assert [len(row["images"]) for row in (reading, looking)] == [2, 1], "the overview, and what the look showed"
    assert reading["target"].startswith("answer ")
    assert looking["target"].startswith("crop ")
    rows = Trajectories(
        scores=torch.tensor([1.0, 0.0]),
        group=torch.zeros(2, dtype=torch.int64),
        row=torch.tensor([0, 0, 0, 1, 1]),
        turn=torch.tensor([0, 0, 1, 0, 1]),
        behaviour_logprobs=torch.zeros(5),
    )
    advantages = demo.last_turn(rows, AlgorithmConfig()).advantages
    assert (advantages != 0).tolist() == [False, False, True, False, True]
    assert advantages[2] > 0 > advantages[4]


def test_the_environment_of_the_documentation_is_played_by_its_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "agents.md").read_text()
    (source,) = re.findall(r"```python\n# mine/env.py\n(.*?)```", page, re.S)
    commands = re.findall(r"^asyncrl (env \w+ mine/env.py:Boxes .*?)(?:  +#.*)?$", page, re.M)
    assert len(commands) == 3
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "env.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    for command in commands:
        monkeypatch.setattr("sys.stdin", io.StringIO("look 0\nanswer 0\n"))
        assert main(command.split()) == 0, command
    out = capsys.readouterr().out
    assert "user: There are boxes 0 to 8." in out
    assert "a call: look 0\n" in out
    assert out.count("tool: [image 0: 56 x 56, about 4 tokens, ") == 2
    assert out.count("end: done   reward ") == 2
    assert pq.read_table("data/boxes.parquet").num_rows == 400
    assert main(["env", "try", "mine/env.py"]) == 2
    assert "Add the class's name, mine/env.py:CLASS; it has Boxes" in capsys.readouterr().err
