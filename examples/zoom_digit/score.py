"""Score a model folder on held-out scenes with nothing but transformers: greedy, one look, then the answer.

python examples/zoom_digit/score.py MODEL [--rows 400] [--first 0] [--wrong-image] [--no-tool]
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from environment import CELLS, Scene, ZoomDigit
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

BATCH, TURN_TOKENS = 100, 6


class Player:
    """A model that says one turn of many conversations."""

    def __init__(self, folder: Path):
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder).float().eval()
        self.processor: Any = AutoProcessor.from_pretrained(folder)

    def say(self, talks: Sequence[list[dict[str, Any]]], images: Sequence[list[Image.Image]]) -> list[str]:
        """Generate the next turn of each conversation of chat messages."""
        said: list[str] = []
        for start in range(0, len(talks), BATCH):
            part = slice(start, start + BATCH)
            prompts = [self.processor.apply_chat_template(talk, add_generation_prompt=True) for talk in talks[part]]
            flat = [image for one in images[part] for image in one]
            inputs = self.processor(text=prompts, images=flat, padding=True, padding_side="left", return_tensors="pt")
            with torch.no_grad():
                rows = self.model.generate(**inputs, max_new_tokens=TURN_TOKENS, do_sample=False)
            said += self.processor.batch_decode(rows[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return [text.strip() for text in said]


def score(folder: Path, rows: int, first: int, config: dict[str, Any]) -> dict[str, float]:
    """Shares of `rows` held-out scenes from number `first` on: right answers, looks at the digit's cell, looks at any.

    `config`: of ZoomDigit. `reads`: right answers of those that looked at the digit's cell; NaN where none did.
    """
    settings, player = ZoomDigit.Config(**config), Player(folder)
    question = ZoomDigit.make_row(0, "held_out")["prompt"]
    opening = [{"role": "user", "content": [{"type": "text", "text": question}, {"type": "image"}]}]
    scenes = [Scene(first + n, "held_out", settings.distractors) for n in range(rows)]
    looks = player.say([opening] * rows, [[scene.overview()] for scene in scenes])
    at = [n for n, look in enumerate(looks) if re.fullmatch(f"crop [0-{CELLS - 1}] [0-{CELLS - 1}]", look)]
    hit = {n for n in at if looks[n] == "crop {} {}".format(*scenes[n].cell)}
    talks, images = [], []
    for n in at:
        shown, cell = scenes[n], [int(word) for word in looks[n].split()[1:]]
        if settings.wrong_image:
            shown = Scene(first + n + 1_000_003, "held_out", settings.distractors, cell=shown.cell)
        part = {"type": "image"} if settings.tool else {"type": "text", "text": "Error: crop is not available"}
        talks.append([*opening, {"role": "assistant", "content": looks[n]}, {"role": "tool", "content": [part]}])
        crop = [shown.crop(cell[0], cell[1], settings.crop_side)] if settings.tool else []
        images.append([scenes[n].overview(), *crop])
    last = looks[:]
    for n, text in zip(at, player.say(talks, images), strict=True):
        last[n] = text
    right = {n for n, text in enumerate(last) if text == f"answer {scenes[n].digit}"}
    reads = len(right & hit) / len(hit) if hit else float("nan")
    return {"success": len(right) / rows, "cell": len(hit) / rows, "calls": len(at) / rows, "reads": reads}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--first", type=int, default=0, help="number of the first scene")
    parser.add_argument("--wrong-image", action="store_true")
    parser.add_argument("--no-tool", action="store_true")
    arguments = parser.parse_args(argv)
    config = {"wrong_image": arguments.wrong_image, "tool": not arguments.no_tool}
    print(json.dumps(score(arguments.model, arguments.rows, arguments.first, config)))


if __name__ == "__main__":
    main()
