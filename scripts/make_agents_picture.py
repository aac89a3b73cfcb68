"""Draw an episode of each example environment, played by its oracle, into docs/images/agents.png.

python scripts/make_agents_picture.py [--episode 14] [--out FILE.png]
"""

from __future__ import annotations

import argparse
import asyncio
import io
import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from asyncrl_plugins.evaluation import play
from asyncrl_plugins.evaluation.environment_files import override

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docs" / "images" / "agents.png"
EXAMPLES = {"zoom_digit": "ZoomDigit", "grid_lake": "GridLake", "calc": "Calc"}
UNIT = 14
SIDE, SPACE, LINE = 112, 10, 20
GREY, BLUE, GREEN, INK = "#666666", "#1a4f9c", "#1a8040", "#222222"


def episode(name: str, number: int) -> list[tuple[str, Any]]:
    """Images, actions and rewards, in order."""
    section = override({"name": f"{ROOT}/examples/{name}/environment.py:{EXAMPLES[name]}"}, ["limits.turns=8"])
    loaded = play.open_environment(section, UNIT)
    start = play.start_of(loaded, play.make_row(loaded, number, "held_out"), seed=1)
    parts: list[tuple[str, Any]] = []
    turns = list(play.policy_of(loaded, "oracle")(start, random.Random(number)))

    def look(kind: str, part: Any) -> None:
        if kind == "action":
            parts.append(("action", part.text))
        elif kind in ("user", "tool"):
            parts.append((kind, part))

    played = asyncio.run(play.play(loaded, section, start, iter(turns), look))
    return [*parts, ("reward", f"reward {sum(played.rewards):g}")]


def drawn(episodes: dict[str, list[tuple[str, Any]]]) -> Image.Image:
    """One row for each episode."""
    font: Any = ImageFont.load_default(size=13)
    sheet = Image.new("RGB", (900, 600), "white")
    draw, top, right = ImageDraw.Draw(sheet), SPACE, 0
    for name, parts in episodes.items():
        draw.text((SPACE, top), name, GREY, font)
        top, left = top + LINE, SPACE
        pictures = [Image.open(io.BytesIO(part)).convert("RGB") for _, part in parts if isinstance(part, bytes)]
        height = max([LINE, *(_scaled(picture).height for picture in pictures)])
        for kind, part in parts:
            if isinstance(part, bytes):
                picture = _scaled(pictures.pop(0))
                sheet.paste(picture, (left, top))
                left += picture.width + SPACE
            else:
                colour = {"action": BLUE, "reward": GREEN}.get(kind, INK)
                draw.text((left, top + height / 2), str(part), colour, font, anchor="lm")
                left += round(draw.textlength(str(part), font)) + SPACE
        top, right = top + height + 2 * SPACE, max(right, left)
    return sheet.crop((0, 0, right, top - SPACE))


def _scaled(picture: Image.Image) -> Image.Image:
    """Enlarged by whole pixels, a line of digits less than the others."""
    factor = max(1, min(SIDE // picture.height, 3 * SIDE // picture.width))
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episode", type=int, default=14)
    parser.add_argument("--out", type=Path, default=FILE)
    arguments = parser.parse_args()
    drawn({name: episode(name, arguments.episode) for name in EXAMPLES}).save(arguments.out, optimize=True)


if __name__ == "__main__":
    main()
