"""`asyncrl inspect` in the terminal, and what its page is made of."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from asyncrl.errors import UserError
from asyncrl_plugins.viewer.inspect import __main__ as command
from asyncrl_plugins.viewer.inspect.filters import read_query
from asyncrl_plugins.viewer.inspect.pictures import for_browser, half_blocks, image_facts
from asyncrl_plugins.viewer.inspect.terminal import one_line, visible
from asyncrl_plugins.viewer.inspect.token_levels import LEGENDS, token_levels
from asyncrl_plugins.viewer.samples.model import SampleImage, SampleQuery, TrajectoryDetail
from tests.plugins.viewer.made_up_samples import (
    FORGOTTEN_TICKET,
    GROUP_SIZE,
    GROUPS,
    HOSTILE,
    HOSTILE_TICKET,
    MadeUpStore,
    png,
)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MadeUpStore:
    made_up = MadeUpStore()
    monkeypatch.setattr(command, "SampleStore", lambda run_dir: made_up)
    return made_up


# --- what is asked for ---


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("0.5", 0.5, 0.5),
        ("0-0.5", 0, 0.5),
        ("-1--0.5", -1, -0.5),
        ("-1-1e-3", -1, 0.001),
        ("<=2", -math.inf, 2),
        (">=-1", -1, math.inf),
        ("<0.5", -math.inf, math.nextafter(0.5, 0)),
        (" > 0 ", math.nextafter(0, 1), math.inf),
    ],
)
def test_a_range_is_read_as_it_is_written(text: str, low: float, high: float) -> None:
    assert read_query({"reward": text}).rewards == (low, high)


def test_all_filters_become_one_query() -> None:
    words = {"step": "3-5", "status": "error, truncated", "staleness": ">1", "prompt": " Digit ", "order": "worst"}
    query = read_query(words)
    assert query.steps == (3, 5)
    assert query.statuses == ("error", "truncated")
    assert query.staleness is not None
    assert query.staleness[0] == 2
    assert (query.prompt, query.order, query.rewards) == ("Digit", "worst", None)
    assert read_query({}) == SampleQuery()
    assert read_query({"step": "3-1e30", "staleness": "<1e999"}) == SampleQuery(
        steps=(3, 2**62), staleness=(-(2**62), 2**62)
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ({"step": "a-b"}, "step cannot be 'a-b'"),
        ({"reward": "5-1"}, "5 is above 1"),
        ({"status": "broken"}, "'broken'"),
        ({"order": "random"}, "newest"),
        ({"end": "max"}, "'max'"),
        ({"error": "loud"}, "'loud'"),
        (
            {"step": "9" * 20},
            "step 99999999999999999999 is out of range. Write numbers from -4611686018427387904 to 46",
        ),
        ({"staleness": "<-1e999"}, "out of range"),
    ],
)
def test_a_filter_that_cannot_be_read_is_named(words: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        read_query(words)


# --- text, tokens, images ---


def test_nothing_that_a_model_wrote_reaches_the_terminal_as_control() -> None:
    assert visible("a\x1b[31m\u202e\x07\r") == "a\\x1b[31m\\u202e\\x07\\r"
    assert visible("a\nb\tc", lines=True) == "a↵\nb→c"
    assert visible("漢字\u3000é") == "漢字\u3000é"
    assert one_line("a\n\nb " * 50, 12) == "a b a b a b…"


def test_levels_of_tokens() -> None:
    trajectory = TrajectoryDetail(
        replace(MadeUpStore().detail(1).trajectories[0].row, staleness=7),
        logprobs=np.asarray([-0.05, -1.0, -3.0, -9.0]),
        learner_logprobs=np.asarray([-0.06, -0.7, -5.0, math.nan]),
        versions=np.asarray([7, 6, 0, 7]),
        source=np.asarray([0, 0, 0, 1]),
        masked=np.asarray([0, 0, 1, 0], bool),
    )
    levels = token_levels(trajectory)
    assert levels == {"diff": "03du", "version": "014u", "mask": "00xu", "logprob": "023u"}
    assert token_levels(replace(trajectory, learner_logprobs=None))["diff"] == "???u"
    for colouring, text in levels.items():
        assert set(text) <= {level for level, _ in LEGENDS[colouring]}, "every level has a meaning"


def test_an_image_is_drawn_with_half_blocks_and_other_bytes_are_not() -> None:
    image = SampleImage("ab" * 32, png(200, (8, 4)))
    facts = image_facts(image)
    assert (facts.width, facts.height, facts.format, facts.problem) == (8, 4, "PNG", "")
    drawn = half_blocks(image, 80, 20)
    assert drawn is not None
    assert drawn.plain == "▀" * 8 + "\n" + "▀" * 8
    assert for_browser(image) == ("image/png", image.data)
    script = SampleImage("cd" * 32, b"<svg onload=alert(1)>")
    assert "no image" in image_facts(script).problem
    assert for_browser(script) is None
    assert half_blocks(script, 80, 20) is None


# --- the terminal ---


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        command, "_console", lambda: Console(force_terminal=True, color_system="truecolor", width=120, markup=False)
    )


def test_a_table_for_those_who_look(store: MadeUpStore, terminal: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["run", "--limit", "4"]) == 0
    shown = capsys.readouterr().out
    assert "60.3" in shown
    assert "reward_exception" in shown
    assert f"1 to 4 of {GROUPS * GROUP_SIZE} samples" in shown
    assert "--offset 4" in shown
    assert "\x1b[31mred" not in shown, "the error's own escape sequence"
    assert store.closed


@pytest.mark.parametrize("colouring", LEGENDS)
def test_a_group_in_full(
    store: MadeUpStore, terminal: None, capsys: pytest.CaptureFixture[str], colouring: str
) -> None:
    assert command.main(["run", "--ticket", "7", "--colour", colouring]) == 0
    shown = capsys.readouterr().out
    assert "▀" in shown, "the image"
    assert "answer" in shown
    assert "<|im_end|>" in shown
    assert all(meaning in shown.replace("\n", " ") for _, meaning in LEGENDS[colouring][:2])
    assert ("difference -2.0000" in shown) is (colouring == "diff"), "the largest differences, as numbers"
    assert ("versions 7 (tokens 1 to 1)" in shown) is (colouring == "version")


def test_a_group_without_colours(store: MadeUpStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["run", "--ticket", str(HOSTILE_TICKET), "--colour", "mask"]) == 0
    shown = capsys.readouterr().out
    assert "98 × 28 PNG" in shown, "size and hash in place of a picture"
    assert "it is gone" in shown
    assert visible(HOSTILE) in shown
    assert not set(shown) & set("\x1b\x07\u202e")
    assert command.main(["run", "--ticket", str(FORGOTTEN_TICKET)]) == 0
    assert "no longer kept" in capsys.readouterr().out


def test_one_completion_of_a_group(store: MadeUpStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["run", "--ticket", "7.3", "--json"]) == 0
    assert [one["trajectory"] for one in json.loads(capsys.readouterr().out)["trajectories"]] == [3]
    assert command.main(["run", "--ticket", "7.9"]) == 2
    assert capsys.readouterr().err == "error: there is no sample 7.9. The group has 7.0, 7.1, 7.2, 7.3\n"
    for text in ("7.", ".3", "7.3.1", "7.-1"):
        with pytest.raises(SystemExit):
            command.main(["run", "--ticket", text])
        assert f"argument --ticket: '{text}' is no ID such as 7 or 7.3\n" in capsys.readouterr().err
