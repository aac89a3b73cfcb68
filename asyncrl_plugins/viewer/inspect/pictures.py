"""Images of a prompt: their facts, as blocks of a terminal, and in a format that browsers show."""

from __future__ import annotations

import io
from dataclasses import dataclass

from PIL import Image
from rich.color import Color
from rich.style import Style
from rich.text import Text

from asyncrl.data.images import decode_image
from asyncrl.errors import UserError
from asyncrl_plugins.viewer.samples.model import SampleImage

SHOWN_BY_BROWSERS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
LARGEST_PIXELS = 64_000_000
_UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
"""Errors that Pillow raises for bytes that are no image."""


@dataclass(frozen=True)
class ImageFacts:
    """Facts from the header of an image."""

    hash: str
    width: int = 0
    height: int = 0
    bytes: int = 0
    format: str = ""
    frames: int = 0
    """Number of frames of the video that it begins; 0 for an image."""
    problem: str = ""
    """Reason that it cannot be shown; empty where it can."""


def image_facts(image: SampleImage) -> ImageFacts:
    if image.data is None:
        return ImageFacts(image.hash, frames=image.frames, problem=image.problem or "its bytes were not kept")
    size = len(image.data)
    try:
        with Image.open(io.BytesIO(image.data)) as picture:
            (width, height), kind = picture.size, picture.format or ""
    except _UNREADABLE:
        problem = f"its {size:,} bytes are no image that can be read"
        return ImageFacts(image.hash, bytes=size, frames=image.frames, problem=problem)
    problem = f"{width} × {height} pixels are too many to show" if width * height > LARGEST_PIXELS else ""
    return ImageFacts(image.hash, width, height, size, kind, image.frames, problem)


def for_browser(image: SampleImage) -> tuple[str, bytes] | None:
    """Return content type and bytes of an image, as PNG if browsers do not know its format; None if it is no image."""
    facts = image_facts(image)
    if image.data is not None and not facts.problem and facts.format in SHOWN_BY_BROWSERS:
        return SHOWN_BY_BROWSERS[facts.format], image.data
    picture = _pixels(image)
    if picture is None:
        return None
    target = io.BytesIO()
    picture.save(target, "PNG")
    return "image/png", target.getvalue()


def half_blocks(image: SampleImage, columns: int, lines: int) -> Text | None:
    """Draw at most `columns` × `lines` characters, each of two pixels one above the other; None if it is no image."""
    picture = _pixels(image)
    if picture is None:
        return None
    scale = min(columns / picture.width, 2 * lines / picture.height, 1.0)
    width, height = max(1, round(picture.width * scale)), max(2, round(picture.height * scale) // 2 * 2)
    small = picture.resize((width, height), Image.Resampling.LANCZOS)
    rows = []
    for y in range(0, height, 2):
        row = Text(no_wrap=True)
        for x in range(width):
            row.append("▀", Style(color=_colour(small, x, y), bgcolor=_colour(small, x, y + 1)))
        rows.append(row)
    return Text("\n", no_wrap=True).join(rows)


def _pixels(image: SampleImage) -> Image.Image | None:
    """Decode to what a model sees; None where it cannot be shown."""
    if image.data is None or image_facts(image).problem:
        return None
    try:
        return decode_image(image.data, image.hash)
    except UserError:
        return None


def _colour(picture: Image.Image, x: int, y: int) -> Color:
    red, green, blue = picture.getpixel((x, y))  # pyright: ignore[reportGeneralTypeIssues] of an RGB image
    return Color.from_rgb(red, green, blue)
