"""Tasks of several turns with the environment of another plug-in: results of calls, and the bonus."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from PIL import Image

from asyncrl.config.environment import EnvironmentConfig
from asyncrl.config.load import load_config
from asyncrl.demo.prepare import GRPO
from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.interface import Action, Start, png_bytes
from asyncrl.environments.loading import load, source_of
from asyncrl.environments.observation import StepResult
from asyncrl.errors import UserError
from tests.plugins.tasks.test_visual_agents import AGENTS

PICTURE = png_bytes(Image.linear_gradient("L").resize((280, 140)).convert("RGB"))


def play(agent: str, answer: Any, *turns: str, **config: Any) -> list[StepResult]:
    """Answers of a recipe's environment to each turn. `config` are settings of its functions."""
    section = load_config(GRPO, [agent]).environment.model_dump()
    section["config"]["settings"].update(config)
    settings = EnvironmentConfig.model_validate(section)

    async def episode() -> list[StepResult]:
        loaded = await load(settings.name, settings.config, source_of(settings), ImageRule())
        start = Start(row={"answer": answer}, images=[PICTURE], seed=1, config=loaded.config)
        one, opening = await loaded.begin(start)
        assert opening is None
        results: list[StepResult] = []
        for number, turn in enumerate(turns):
            results.append(await loaded.step(one, Action(turn, number)))
        return results

    return asyncio.run(episode())


def parts(result: StepResult) -> list[Any]:
    assert result.observation is not None
    return [part for message in result.observation.messages for part in message.parts]


def zoom(box: list[float]) -> str:
    called = {"name": "image_zoom_in_tool", "arguments": {"bbox_2d": box, "label": "it"}}
    return f"<think>closer</think><tool_call>{json.dumps(called)}</tool_call>"


RIGHT = "<think>t</think><answer>Red</answer>"


@pytest.mark.parametrize(
    ("turns", "reward", "accuracy"),
    [
        ((zoom([0, 0, 140, 140]), RIGHT), 1.2, 1.0),
        ((RIGHT,), 0.0, 1.0),  # right without looking: the bonus is for looking
        ((zoom([0, 0, 140, 140]), "<think>t</think><answer>blue</answer>"), 0.0, 0.0),  # RLLaVA pays 1.2 here
        ((zoom([0, 0, 5, 140]), RIGHT), 0.0, 1.0),  # the call failed
        ((zoom([0, 0, 140, 140]), zoom([0, 0, 70, 70]), RIGHT), 1.2, 1.0),  # once, not for each crop
        ((zoom([0, 0, 140, 140]), "<answer>blue</answer> no: <answer>the red</answer>"), 1.2, 1.0),  # the last block
    ],
)
def test_a_bonus_is_paid_once_for_a_right_answer_behind_a_call_that_worked(
    turns: tuple[str, ...], reward: float, accuracy: float
) -> None:
    *looks, last = play("deepeyes", {"ground_truth": "red", "style": "rule"}, *turns)
    assert [each.done for each in looks] == [False] * len(looks)
    assert sum(each.reward for each in (*looks, last)) == reward
    assert last.done
    assert last.info["accuracy"] == accuracy


def test_a_crop_is_in_pixels_clipped_and_refused_by_its_size() -> None:
    whole, flat, four = play("deepeyes", "red", zoom([-10, 20, 400, 90]), zoom([0, 0, 280, 2]), zoom([1, 2, 3]))
    (crop,) = parts(whole)
    assert ImageRule().fit(Image.new("RGB", (280, 70))) is not None
    with Image.open(io.BytesIO(crop)) as shown:
        assert shown.size == (280, 70)
    assert "280 x 2 pixels of the image's 280 x 140" in parts(flat)[0]
    assert "3 numbers" in parts(four)[0]


@contextmanager
def retrieval(reply: Any, status: int = 200) -> Iterator[tuple[str, list[Any]]]:
    """Address of a server with one reply, and what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/retrieve", asked
    finally:
        server.shutdown()
        server.server_close()


QUERY = "<think>t</think><search> height of the tower </search>"


def test_a_search_shows_passages_and_a_dead_service_is_no_empty_result() -> None:
    reply = {"result": [[{"document": {"contents": "Tower\nIt is 330 m high."}, "score": 1.0}, "x" * 3000]]}
    with retrieval(reply) as (url, asked):
        found, empty, last = play(
            "mat_search_turns", "330 m", QUERY, "<search> </search>", "<think>t</think><answer>330 m</answer>", url=url
        )
    assert asked == [{"queries": ["height of the tower"], "topk": 4}]
    assert parts(found) == ["(1) Tower\nIt is 330 m high.\n(2) " + "x" * 2000]
    assert parts(empty) == ["Error: the query is empty"]
    assert last.reward == 1.2
    with pytest.raises(RuntimeError, match=r"the search at http://127\.0\.0\.1:\d+/retrieve failed"):
        play("mat_search_turns", "330 m", QUERY, url=url)
    with retrieval({"detail": "no"}, 500) as (url, _), pytest.raises(RuntimeError, match="500"):
        play("mat_search_turns", "330 m", QUERY, url=url)


def test_code_sees_the_picture_and_shows_what_it_made() -> None:
    code = "<think>t</think>```python\nshow(images[0].rotate(90, expand=True))\nprint(images[0].size)\n```"
    try:
        turned, last = play("mat_code_turns", "330", code, "<think>t</think><answer>330</answer>")
    except UserError as problem:
        pytest.skip(str(problem))
    text, picture = parts(turned)
    assert text == "(280, 140)\n"
    with Image.open(io.BytesIO(picture)) as shown:
        assert shown.size == (140, 280)
    assert last.reward == 1.2


def test_settings_that_there_are_not_are_refused_at_the_start() -> None:
    with pytest.raises(UserError, match=r"unknown key environment\.config\.settings\.bonsu\. Did you mean 'bonus'\?"):
        play("deepeyes", "red", "red", bonsu=1)


def test_each_agent_is_a_word_over_a_file_that_names_a_model() -> None:
    for name in AGENTS:
        config = load_config(GRPO, [name])
        assert config.environment.is_used, name
        assert config.environment.limits.turns == 5
