"""Episodes in the terminal end, show and refuse as those of a run."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from asyncrl.cli import main
from asyncrl.config.environment import EnvironmentConfig
from asyncrl.config.sections import ModelConfig
from asyncrl.environments.interface import Start
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.evaluation.play import open_environment
from asyncrl_plugins.evaluation.play import play as by_itself
from asyncrl_plugins.evaluation.played_by_model import tokens_of_image
from asyncrl_plugins.evaluation.terminal import Terminal
from tests.rigs.tiny_families import make_family, make_llava

OPENS_WITH_AN_IMAGE = """
from PIL import Image
from asyncrl.environments.interface import observe
from asyncrl.environments.observation import StepResult

class Where:
    def reset(self, start):
        return observe("look", Image.new("RGB", (56, 56)))

    def step(self, action):
        return StepResult(observe(Image.new("RGB", (56, 56))) if action.turn == 0 else None, done=action.turn == 1)
"""


@pytest.mark.parametrize(("images", "end"), [(1, "done"), (0, "limit images")])
def test_an_opening_is_of_the_user_and_its_images_are_not_of_the_limit(tmp_path: Path, images: int, end: str) -> None:
    (tmp_path / "where.py").write_text(OPENS_WITH_AN_IMAGE)
    config = EnvironmentConfig.model_validate({"name": f"{tmp_path}/where.py:Where", "limits": {"images": images}})
    loaded = open_environment(config, unit=28)
    shown: list[str] = []
    turns = asyncio.run(by_itself(loaded, config, Start(), iter(["a", "b"]), lambda kind, part: shown.append(kind)))
    assert (turns.end, turns.images) == (end, 1)
    assert [kind for kind in shown if kind in ("user", "tool")] == ["user", "user", "tool"], "the role may be left out"


@pytest.mark.parametrize(
    ("make", "tokens"),
    [
        (lambda folder: make_family("qwen2_vl", folder, patch=7), 64),
        (lambda folder: make_family("qwen3_vl", folder, patch=14), 16),
        (make_llava, 16),
    ],
    ids=["patches of 7", "patches of 14", "one size"],
)
def test_a_model_counts_the_tokens_of_an_image(
    make: Callable[[Path], Path], tokens: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    processor = PromptProcessor(ModelConfig(path=str(make(tmp_path / "model"))))
    buffer = io.BytesIO()
    Image.new("RGB", (112, 112)).save(buffer, "PNG")
    Terminal(tmp_path, partial(tokens_of_image, processor))("user", buffer.getvalue())
    assert f"[image 0: 112 x 112, {tokens} tokens, " in capsys.readouterr().out


def test_a_unit_beside_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "where.py").write_text(OPENS_WITH_AN_IMAGE)
    assert main(["env", "try", f"{tmp_path}/where.py:Where", "--unit", "14", "--model", str(tmp_path)]) == 2
    assert "leave --unit out" in capsys.readouterr().err


EDITS_WHAT_IT_CANNOT = """
from asyncrl.environments.interface import observe
from asyncrl.environments.observation import PastTurn, StepResult

class Where:
    def reset(self, start):
        return None

    def step(self, action):
        return StepResult(observe("on"), 1.0, history=(PastTurn(0),) if action.turn == 0 else (PastTurn(5),))
"""


def test_the_terminal_refuses_an_edited_history_as_a_run_does_and_shows_no_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "where.py").write_text(EDITS_WHAT_IT_CANNOT)
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\nc\n"))
    assert main(["env", "try", f"{tmp_path}/where.py:Where"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("end: environment_observation: the edited history has turn 5, and 2 were taken   no reward")


NEEDS_ITS_ROW = """
from asyncrl.environments.interface import EpisodeOver, observe

class Where:
    def reset(self, start):
        self.start = start
        return observe(start.row["map"])

    def step(self, action):
        raise EpisodeOver(self.start.image(0).size[0])
"""


def test_the_terminal_takes_rows_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "where.py").write_text(NEEDS_ITS_ROW)
    for width in (56, 84):
        Image.new("RGB", (width, 56)).save(tmp_path / f"{width}.png")
    rows = [{"prompt": f"q{width}", "answer": "", "images": [f"{width}.png"], "map": f"m{width}"} for width in (56, 84)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = tmp_path / "run.yaml"
    run.write_text(
        f"data: {{train_files: [{tmp_path}/rows.jsonl]}}\nenvironment: {{name: {tmp_path}/where.py:Where}}\n"
    )
    for words, width in (((), 56), (("--row", "1"), 84)):
        monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
        assert main(["env", "try", str(run), *words]) == 0
        out = capsys.readouterr().out
        assert f"  user: <image>q{width}\n  user: [image 0: {width} x 56," in out
        assert f"  user: m{width}\n" in out
        assert f"end: done   reward {width} in" in out


BAD_INFO = """
from asyncrl.environments.interface import observe
from asyncrl.environments.observation import StepResult

class Where:
    def reset(self, start):
        return None

    def step(self, action):
        return StepResult(observe("on"), 1.0, info={"when": object() if action.text == "a" else "y" * 5000})
"""


@pytest.mark.parametrize(("said", "why"), [("a", "Object of type object is not"), ("b", "info has 5012 characters")])
def test_the_terminal_refuses_an_info_that_no_record_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: str, why: str
) -> None:
    (tmp_path / "where.py").write_text(BAD_INFO)
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    assert main(["env", "try", f"{tmp_path}/where.py:Where"]) == 1
    assert f"Where.step returned an info that cannot be recorded: {why}" in capsys.readouterr().out


HANGS = """
import asyncio, time

class Where:
    def reset(self, start):
        return None

    async def step(self, action):
        time.sleep(60) if action.text == "plain" else await asyncio.sleep(60)

    def close(self):
        time.sleep(60)
"""


@pytest.mark.parametrize("said", ["plain", "async"])
def test_the_terminal_ends_what_hangs_as_a_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: str
) -> None:
    (tmp_path / "where.py").write_text(HANGS)
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    assert main(["env", "try", f"{tmp_path}/where.py:Where", "timeouts.step_s=0.2"]) == 1
    close, end = capsys.readouterr().out.splitlines()[-2:]
    assert close.startswith("close: close was not done after 0.2 s (environment.timeouts.step_s)   ")
    assert end.startswith("end: environment_timeout: step was not done after 0.2 s (environment.timeouts.step_s)   no")


def test_the_terminal_shows_what_a_rewritten_history_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "where.py").write_text(
        OPENS_WITH_AN_IMAGE.replace(" if action.turn == 0 else None, done=action.turn == 1", "")
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("<think>left?</think>a\nb\n"))
    assert main(["env", "try", f"{tmp_path}/where.py:Where", "history=strip_thinking", "keep_images=1"]) == 0
    first, second = capsys.readouterr().out.split("a new segment begins")[1:]
    assert "| policy: a\n" in first
    assert "| policy: a\n    | tool: [image left out]\n    | policy: b\n" in second
