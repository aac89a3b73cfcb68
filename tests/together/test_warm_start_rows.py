"""Rows of a warm start, which an environment of tools writes with its own policy."""

from __future__ import annotations

from pathlib import Path

from asyncrl.cli import main
from asyncrl.config.sections import DataConfig
from asyncrl.data.dataset import open_train
from asyncrl.data.prompts import PromptRenderer

TWO_CALLS = """
from PIL import Image
from asyncrl.environments.interface import EpisodeOver, observe
from asyncrl_plugins.tools.environment import ToolEnvironment, tool

class Boxes(ToolEnvironment):
    policies = {"oracle": lambda start, rng: iter([call("look", 1) + call("look", 2), call("say", start.seed)])}

    @classmethod
    def make_row(cls, index, split):
        return {"prompt": f"Where? {index}. "}

    def reset(self, start):
        return observe("Boxes 0 to 3.", role="user")

    @tool
    def look(self, box: int) -> Image.Image:
        \"\"\"Look.

        box: its number.
        \"\"\"
        return Image.new("RGB", (56, 56))

    @tool
    def say(self, box: int) -> str:
        \"\"\"Say.

        box: its number.
        \"\"\"
        raise EpisodeOver(1.0)

def call(name, box):
    return '<tool_call>{"name": "%s", "arguments": {"box": %d}}</tool_call>' % (name, box)
"""


def test_an_environments_own_policy_becomes_rows_of_a_warm_start(tmp_path: Path) -> None:
    """A row for each turn; the opening belongs to the prompt, and each call has a message of its own."""
    (tmp_path / "boxes.py").write_text(TWO_CALLS)
    words = ["--policy", "oracle", "--count", "2", "--out", f"{tmp_path}/sft.parquet"]
    assert main(["env", "rows", f"{tmp_path}/boxes.py:Boxes", *words]) == 0
    data = DataConfig(train_files=(f"{tmp_path}/sft.parquet",))
    rows = open_train(data, "sft")
    assert len(rows) == 4
    rendered = [PromptRenderer(data).render(rows[index], rows.row_id(index)) for index in range(4)]
    roles = [[message.role for message in each.prompt.messages] for each in rendered]
    assert roles == [["user"], ["user", "assistant", "tool", "tool"]] * 2
    assert [len(each.prompt.image_hashes) for each in rendered] == [0, 2, 0, 2]
    assert rows[0]["prompt"][0]["content"] == "Where? 0. Boxes 0 to 3."
    assert rendered[3].target == '<tool_call>{"name": "say", "arguments": {"box": 1}}</tool_call>'
