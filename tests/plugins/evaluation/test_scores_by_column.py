"""`asyncrl eval --by`: scores of each value of a column."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.score import Score
from asyncrl_plugins.evaluation import eval_command
from asyncrl_plugins.evaluation.eval_command import describe_by
from asyncrl_plugins.evaluation.plain_scores import EvaluatedRow


def row(value: object, reward: float | None) -> EvaluatedRow:
    components = {} if reward is None else {"short": reward}
    return EvaluatedRow(
        RewardSample(completion="", columns={"kind": value, "id": id(value)}),
        Score(reward=reward, components=components),
    )


def test_each_value_has_its_scores_and_one_without_any_says_so(make_config: Callable[..., RunConfig]) -> None:
    rows = [row("yes", 1.0), row("yes", 0.0), row("no", 1.0), row("no", 1.0), row(None, None)]
    lines = describe_by(make_config(), rows, "kind").splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["kind=None", "pass@1", "nan"],
        ["kind=no", "pass@1", "1.0000"],
        ["kind=yes", "pass@1", "0.5000"],
    ]
    assert lines[0].endswith("rows 1   errors 1")


def test_a_column_that_is_not_there_is_refused_before_a_row_is_scored(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b", "kind": "yes"}\n')
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(make_config(data={"train_files": (str(rows),), "val_files": (str(rows),)})))
    monkeypatch.setattr(eval_command, "score_held_out", lambda *_, **__: pytest.fail("scored"))
    given = Namespace(config=file, overrides=[], out=None, by="sort", prefix="", decodings=None, model=tmp_path)
    with pytest.raises(UserError, match="--by is 'sort', and the rows have the columns kind"):
        eval_command.run_eval(given)


def test_a_column_that_groups_nothing_is_refused(make_config: Callable[..., RunConfig]) -> None:
    many = [row(f"{number}", 1.0) for number in range(60)]
    with pytest.raises(UserError, match="has 60 values, over 50"):
        describe_by(make_config(), many, "kind")
