"""The task `mat_code_turns`, whose environment runs code with the tool of another plug-in."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from asyncrl.errors import UserError
from tests.plugins.tasks.test_visual_agents import parts, play


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
