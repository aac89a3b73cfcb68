"""Scores that `asyncrl demo digits` has of `asyncrl eval`: its start by each decoding, and its export again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.cli import main
from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from asyncrl.rewards.score import EvaluationScores, evaluation_scores
from asyncrl_plugins.evaluation import decodings
from asyncrl_plugins.evaluation.decodings import first_words, score_decodings
from tests.rigs.two_processes import start_command
from tests.system.test_demo import FEW, QUICK, check_scored_demo

MakeConfig = Callable[..., RunConfig]


@pytest.mark.slow
def test_the_demo_from_its_warm_start_to_a_checked_export(tmp_path: Path) -> None:
    demo, log = tmp_path / "demo", tmp_path / "log"
    few = (f"data.max_val_rows={FEW}", "batch.group_size=2")
    command = start_command("demo", "--folder", str(demo), *QUICK, *few, log=log)
    assert command.wait(timeout=300) == 0, log.read_text()
    check_scored_demo(demo, log.read_text(), ["data", "baselines", "grpo", "check"], rows=FEW)


def test_first_words_are_those_of_most_demonstrations(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    targets = ["read 3 7", "answer 4", "read 1", "4 is it", "", None, "so it is 4"]
    rows.write_text("".join(f'{{"prompt": "?", "answer": "", "target": {json.dumps(each)}}}\n' for each in targets))
    data = make_config(data={"train_files": [str(rows)]}).data
    assert first_words(data) == ["answer", "read", "so"], "no numbers"
    monkeypatch.setattr(decodings, "MOST_WORDS", 1)
    assert first_words(data) == ["read"]
    assert first_words(data.model_copy(update={"target_key": "demonstration"})) == []


def test_each_decoding_has_its_temperature_and_first_word(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, str]] = []

    def evaluated(config: RunConfig, folder: Path, *, prefix: str) -> EvaluationScores:
        assert folder == tmp_path
        asked.append((config.evaluation.temperature, prefix))
        return evaluation_scores([[(float(len(asked)), 0.0)]])

    monkeypatch.setattr(decodings, "evaluate", evaluated)
    monkeypatch.setattr(decodings, "first_words", lambda data: ["answer", "read"])
    found = score_decodings(make_config(rollout={"temperature": 0.7}), tmp_path)
    assert asked == [(0.0, ""), (0.7, ""), (0.0, "answer"), (0.0, "read")]
    assert {name: scores.accuracy for name, scores in found.items()} == {
        "greedy": 1.0,
        "sampled at temperature 0.7": 2.0,
        "greedy, first word `answer`": 3.0,
        "greedy, first word `read`": 4.0,
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--by", "kind"], "keeps scores alone: leave --by out"),
        (["--decodings", "nowhere/file"], "but there is no folder"),
        (
            ["environment.name=any.py:Any", "environment.limits={turns: 1, tokens: 8, tokens_per_turn: 8}"],
            "an environment answers: leave it out",
        ),
    ],
)
def test_what_decodings_cannot_do_is_refused(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    config = make_config()
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    decodings = ["--decodings", str(tmp_path / "scores.json")]
    assert main(["eval", str(file), "--model", config.model.path, *decodings, *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "scores.json").exists()
