"""Functions as the tools of an environment, in a worker process."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from PIL import Image

from asyncrl.config.environment import EnvironmentConfig
from asyncrl.environments.episodes import EnvironmentFailed, EnvironmentWorkers
from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.interface import Start
from asyncrl.errors import UserError


def untyped(box):  # type: ignore[no-untyped-def]
    """Show a part.

    box: where.
    """


def show(pixels: int) -> Image.Image:
    """Show a grey square.

    pixels: at its side.
    """
    return Image.new("L", (pixels, pixels))


def no_json(of: str) -> object:
    """Return what is neither text nor image.

    of: the word that is asked for.
    """
    return {of: object()}


def test_results_of_tools_that_cannot_be_shown_are_said_to_the_policy_or_counted() -> None:
    """Sizes of an image are the policy's to fix; what is no result is the tool's own failure."""

    async def play() -> None:
        tools = [f"{__file__}:{name}" for name in ("show", "no_json")]
        config = {"functions": tools, "call_format": "plain"}
        pool = EnvironmentWorkers(
            EnvironmentConfig.model_validate({"name": "tools", "config": config, "workers": 1}), ImageRule(unit=14)
        )
        await pool.start()
        try:
            episode = await pool.begin(Start())
            shown = [await episode.step(f"show {side}") for side in (1, 10_000, 20_000, 0)]
            parts = [each.observation.messages[0].parts[0] for each in shown if each.observation]
            assert isinstance(parts[0], bytes)
            assert Image.open(io.BytesIO(parts[0])).size == (28, 28), "a pixel becomes two units"
            for part, side, why in zip(parts[1:], (10_000, 20_000, 0), ("89478485", "89478485", "empty"), strict=True):
                assert isinstance(part, str)
                assert part.startswith(f"Error: an image of {side} x {side} pixels cannot be shown")
                assert why in part
            with pytest.raises(
                EnvironmentFailed, match="tool no_json returned dict, of which no text or image"
            ) as failed:
                await episode.step("no_json x")
            assert failed.value.kind == "environment_exception"
            assert pool.errors == {"environment_exception": 1}
        finally:
            await pool.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"functions": [f"{__file__}:untyped"]}, "parameter 'box' has no annotation. Write its type"),
        ({"functions": ["calculater"]}, "Did you mean 'calculator'?"),
        ({"functions": [f"{__file__}:shows"]}, "has no function 'shows'. Did you mean 'show'?"),
        ({"functions": []}, "environment.config.functions"),
        ({"functions": ["calculator"], "call_format": "python"}, "there is no tool 'python'"),
        ({"functions": ["calculator"], "calls_per_turn": 0}, "environment.config.calls_per_turn"),
    ],
)
def test_mistakes_in_the_settings_are_said_at_the_start(config: dict[str, Any], problem: str) -> None:
    async def start() -> None:
        pool = EnvironmentWorkers(EnvironmentConfig.model_validate({"name": "tools", "config": config, "workers": 1}))
        await pool.start()

    with pytest.raises(UserError) as refused:
        asyncio.run(start())
    assert problem in str(refused.value)
