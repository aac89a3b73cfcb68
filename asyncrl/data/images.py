"""Images: encoded bytes everywhere, pixels only where a processor needs them. Imports no torch."""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from asyncrl.config.suggest import file_hint
from asyncrl.errors import UserError

MAX_PIXELS = 89_478_485
"""Larger images are refused: a small file may unpack to gigabytes. Pillow warns from the same number on."""

_BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError, struct.error, zlib.error)
"""What Pillow's decoders raise on damaged files."""


def content_hash(data: bytes | memoryview) -> str:
    """SHA-256 of encoded image bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def decode_image(data: bytes, where: str) -> Image.Image:
    """RGB pixels, upright (EXIF) and on white where transparent; the first frame of an animation.

    `where` names the row and image in the UserError about data that is no image, damaged or too large.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            _check_size(image, where)
            image.load()
            return _as_rgb(ImageOps.exif_transpose(image))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(f"{where}: {error}. Scale the image down or leave the row out") from None
    except UnidentifiedImageError:
        raise UserError(_no_image(data, where)) from None
    except _BROKEN as error:
        raise UserError(
            f"{where}: the image is damaged ({len(data)} bytes; {type(error).__name__}: {error}). "
            "Replace the file or leave the row out"
        ) from error


def _no_image(data: bytes, where: str) -> str:
    return (
        f"{where}: these {len(data)} bytes are no image that Pillow can read (they start with {data[:16]!r}). "
        "Convert it to PNG or JPEG, or leave the row out"
    )


def _check_size(image: Image.Image, where: str) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise UserError(
            f"{where}: the image is {width} x {height} pixels, so there is nothing in it. Leave the row out"
        )
    if width * height > MAX_PIXELS:
        raise UserError(
            f"{where}: the image has {width} x {height} pixels, over the limit of {MAX_PIXELS} in all. "
            "Scale it down or leave the row out"
        )


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        # convert() would clip 16-bit grey at 255, leaving a white image.
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if "A" in image.getbands() or "transparency" in image.info:
        layers = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers)
    return image.convert("RGB")


def check_header(data: bytes, where: str) -> None:
    """Refuse data that is plainly no image, or too large, without decoding any pixel."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            _check_size(image, where)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(f"{where}: {error}. Scale the image down or leave the row out") from None
    except UnidentifiedImageError:
        raise UserError(_no_image(data, where)) from None
    except _BROKEN as error:
        raise UserError(f"{where}: the image is damaged ({error}). Replace the file or leave the row out") from error


def load_image_bytes(value: Any, base_dir: Path, where: str) -> bytes:
    """Encoded bytes of one image as data sets hold it.

    Accepts a path (relative ones below `base_dir`), encoded bytes, the `datasets` library's
    `{"bytes": ..., "path": ...}`, or a PIL image (which becomes a PNG).
    """
    if isinstance(value, dict) and value.get("bytes") is not None:
        value = value["bytes"]
    elif isinstance(value, dict) and value.get("path"):
        value = value["path"]
    if isinstance(value, bytes | bytearray | memoryview):
        if not len(value):
            raise UserError(f"{where}: the image has 0 bytes. Write it again or leave the row out")
        return bytes(value)
    if isinstance(value, Image.Image):
        return _encode_png(value, where)
    if isinstance(value, str | Path) and str(value):
        return _read(str(value), base_dir, where)
    raise UserError(
        f"{where}: {_described(value)} is no image. Expected a path, encoded bytes or "
        '{"bytes": ..., "path": ...}; check data.image_key'
    )


def _encode_png(image: Image.Image, where: str) -> bytes:
    _check_size(image, where)
    buffer = io.BytesIO()
    keeps = image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
    (image if keeps else image.convert("RGB")).save(buffer, format="PNG")
    return buffer.getvalue()


def _read(name: str, base_dir: Path, where: str) -> bytes:
    if "://" in name or name.startswith("data:"):
        raise UserError(f"{where}: {name[:80]!r} is an address, not a file. Download the images and give their paths")
    path = base_dir / name
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(
            f"{where}: there is no image {path}: {file_hint(path)} "
            "Relative paths start at the folder of the data file, or at data.image_dir if that is set"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: cannot read the image {path}: {error}") from None
    if not data:
        raise UserError(f"{where}: the image {path} has 0 bytes. Write it again or leave the row out")
    return data


def _described(value: Any) -> str:
    if isinstance(value, dict):
        return f"a mapping with {sorted(map(str, value))}"
    return f"{type(value).__name__} {str(value)[:60]!r}"
