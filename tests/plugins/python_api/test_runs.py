"""A run that Python starts: real processes, with functions and rows of the caller."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import asyncrl
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from tests.plugins.python_api.test_source import cells

pytestmark = pytest.mark.slow
assert cells  # a fixture
ROWS = [{"prompt": f"how many is {number}?", "answer": str(number)} for number in range(16)]


@pytest.fixture
def config(make_config: Callable[..., RunConfig], tmp_path: Path) -> RunConfig:
    whole = make_config(
        batch={"prompts_per_step": 4, "group_size": 2},
        trainer={"max_steps": 2, "save_freq": 1, "samples_per_step": 4},
        learner={"max_staleness": 0},
    )
    return whole.model_copy(update={"run_dir": str(tmp_path / "run")})


def test_a_run_takes_functions_and_rows_goes_on_and_refuses_others(
    cells: Any, config: RunConfig, tmp_path: Path
) -> None:
    told: list[int] = []

    def tell(run: asyncrl.Run, step: dict[str, Any]) -> None:
        assert run.folder == tmp_path / "run"
        told.append(step["step"])

    given: dict[str, Any] = {"data": ROWS, "held_out": ROWS[:4], "callbacks": [tell]}
    run = asyncrl.train(config, reward=cells.reward, **given)
    assert told == [1, 2] == [step["step"] for step in run.metrics]
    samples = list(run.samples())
    assert len(samples) == 2 * 4 * 2
    assert {sample["reward"] for sample in samples} == {cells.reward(sample["text"]) for sample in samples}
    assert [one["reward"] for one in run.best(3)] == sorted((s["reward"] for s in samples), reverse=True)[:3]
    assert run.evaluations[-1]["rows"] == 4
    assert f"{tmp_path / 'run'}': finished, step 2, held-out accuracy" in repr(run)

    longer = config.model_copy(update={"trainer": config.trainer.model_copy(update={"max_steps": 3})})
    with pytest.raises(UserError, match="reward"):
        asyncrl.train(longer, reward=cells.doubled, resume=True, **given)
    asyncrl.train(longer, reward=cells.reward, resume=True, **given)
    assert told == [1, 2, 3]
    again = asyncrl.load(tmp_path / "run")
    assert again.status["phase"] == "finished"
    assert again.config.reward.functions[0].function.endswith(":reward")
    assert (again.export(tmp_path / "model") / "config.json").is_file()


def test_a_callback_that_raises_ends_the_run_and_leaves_no_process(config: RunConfig) -> None:
    def stop(run: asyncrl.Run, step: dict[str, Any]) -> None:
        raise ZeroDivisionError("enough")

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(ZeroDivisionError, match="enough"):
        asyncrl.train(config, callbacks=[stop])
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_mistakes_are_errors_with_the_fix(config: RunConfig, tmp_path: Path) -> None:
    given = {**config.model_dump(mode="json", exclude_defaults=True), "learner": {"max_stalenes": 1}}
    with pytest.raises(UserError, match=r"(?s)^config.yaml in .*max_stalenes: did you mean learner.max_staleness"):
        asyncrl.train(given)
    with pytest.raises(UserError, match="run_dir is not set"):
        asyncrl.train({"model": {"path": "x"}})
    with pytest.raises(UserError, match=r"data\.train_files is given twice"):
        asyncrl.train(config, "data.train_files=[x.jsonl]", data=ROWS)
    (tmp_path / "elsewhere.yaml").write_text(f"run_dir: {tmp_path / 'elsewhere'}\n")
    with pytest.raises(UserError, match=r"learner\.max_stalenes"):
        asyncrl.train({**given, "run_dir": Path("old")}, str(tmp_path / "elsewhere.yaml"), data=ROWS)
    assert [file.suffix for file in (tmp_path / "elsewhere" / "inputs").iterdir()] == [".parquet"]
    with pytest.raises(UserError, match="there is no run in"):
        asyncrl.load(tmp_path / "nothing")
    with pytest.raises(AttributeError, match=r"has no attribute 'trian'\. It has Run, RunConfig, load, train"):
        asyncrl.trian  # pyright: ignore[reportAttributeAccessIssue] # noqa: B018
