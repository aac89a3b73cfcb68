"""Images of a prompt: what they are, as blocks of a terminal, and as a browser may have them."""

from __future__ import annotations

import io
from dataclasses import dataclass

from PIL import Image
from rich.color import Color
from rich.style import Style
from rich.text import Text

from asyncrl.tools.samples import SampleImage

SHOWN_BY_BROWSERS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
LARGEST_PIXELS = 64_000_000
_READING = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
"""What Pillow raises for bytes that are no image."""


@dataclass(frozen=True)
class ImageFacts:
    hash: str
    width: int = 0
    height: int = 0
    bytes: int = 0
    format: str = ""
    frames: int = 0
    """Of the video that it begins; 0: it is an image."""
    problem: str = ""
    """Why it cannot be shown; empty where it can."""


def image_facts(image: SampleImage) -> ImageFacts:
    """From the header alone."""
    if image.data is None:
        return ImageFacts(image.hash, frames=image.frames, problem=image.problem or "its bytes were not kept")
    try:
        with Image.open(io.BytesIO(image.data)) as picture:
            width, height = picture.size
            kind = picture.format or ""
    except _READING:
        problem = f"its {len(image.data):,} bytes are no image that can be read"
        return ImageFacts(image.hash, bytes=len(image.data), frames=image.frames, problem=problem)
    problem = f"{width} × {height} pixels are too many to show" if width * height > LARGEST_PIXELS else ""
    return ImageFacts(image.hash, width, height, len(image.data), kind, image.frames, problem)


def for_browser(image: SampleImage) -> tuple[str, bytes] | None:
    """Content type and bytes; other formats as PNG. None where it cannot be shown: never anything but an image."""
    facts = image_facts(image)
    if facts.problem or image.data is None:
        return None
    if facts.format in SHOWN_BY_BROWSERS:
        return SHOWN_BY_BROWSERS[facts.format], image.data
    picture = _pixels(image.data)
    if picture is None:
        return None
    target = io.BytesIO()
    picture.save(target, "PNG")
    return "image/png", target.getvalue()


def half_blocks(image: SampleImage, columns: int, lines: int) -> Text | None:
    """At most `columns` × `lines` characters, each of two pixels one above the other; None where it cannot be shown."""
    picture = None if image.data is None or image_facts(image).problem else _pixels(image.data)
    if picture is None:
        return None
    scale = min(columns / picture.width, 2 * lines / picture.height, 1.0)
    width, height = max(1, round(picture.width * scale)), max(2, round(picture.height * scale) // 2 * 2)
    small = picture.resize((width, height), Image.Resampling.LANCZOS)
    shown = Text(no_wrap=True)
    for y in range(0, height, 2):
        for x in range(width):
            shown.append("▀", Style(color=_colour(small, x, y), bgcolor=_colour(small, x, y + 1)))
        if y + 2 < height:
            shown.append("\n")
    return shown


def _pixels(data: bytes) -> Image.Image | None:
    """RGB over white."""
    try:
        with Image.open(io.BytesIO(data)) as picture:
            coloured = picture.convert("RGBA")
    except _READING:
        return None
    ground = Image.new("RGBA", coloured.size, "white")
    return Image.alpha_composite(ground, coloured).convert("RGB")


def _colour(picture: Image.Image, x: int, y: int) -> Color:
    red, green, blue = picture.getpixel((x, y))  # pyright: ignore[reportGeneralTypeIssues] of an RGB image
    return Color.from_rgb(red, green, blue)
