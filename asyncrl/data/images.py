"""Images and videos: encoded bytes everywhere, pixels only where a processor needs them. Imports no torch.

A video is a list of frames; files of moving pictures are not decoded.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import math
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from asyncrl.errors import BadStateError, UserError, file_hint

MAX_PIXELS = 89_478_485
"""Larger images are refused: a small file may unpack to gigabytes. Pillow warns from the same number on."""

_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*")
_BASE64_STARTS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "Qk", "SUkq", "TU0AK")
"""First characters of PNG, JPEG, GIF, WebP, BMP and TIFF files in base64."""
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError, struct.error, zlib.error)
"""Errors of Pillow's decoders on damaged files."""
_PNG_ORIENTATION = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")
"""Names of the chunks that may say how a PNG is turned; some follow the pixels."""
_SIDEWAYS = (5, 6, 7, 8)
"""EXIF orientations in which width and height change places."""
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""Modes of Pillow that a PNG holds as they are."""
_BLACK_TAGS = (ExifTags.Base.SMinSampleValue, ExifTags.Base.MinSampleValue)
_WHITE_TAGS = (ExifTags.Base.SMaxSampleValue, ExifTags.Base.MaxSampleValue)
"""TIFF tags of the range that numbers are meant in."""
LEAVE_OUT = "leave the row out"
VIDEO_FIX = (
    "A row's videos are a list of videos, each a list of frames (paths or bytes of images), such as "
    '[["clip/001.png", "clip/002.png"]]. Take frames out of a file with: ffmpeg -i clip.mp4 -vf fps=2 clip/%03d.png'
)


def content_hash(data: bytes | memoryview) -> str:
    """SHA-256 of encoded image bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def decode_image(data: bytes, where: str, otherwise: str = LEAVE_OUT) -> Image.Image:
    """RGB pixels, upright (EXIF) and on white where transparent; the first frame of an animation.

    `where` names the row and image in the UserError about data that is no image, damaged or too large; `otherwise` is
    what its author can do but fix it.
    """
    with _opened(data, where, otherwise) as image:
        image.load()
        levels = _levels(image, where, otherwise)
        upright = ImageOps.exif_transpose(image)
        return _as_rgb(_as_grey8(upright, *levels) if levels else upright)


def image_size(data: bytes, where: str) -> tuple[int, int]:
    """Width and height of what `decode_image` makes, from the header alone where that tells them. Raises as it does."""
    with _opened(data, where) as image:
        if image.format == "PNG" and not any(mark in data for mark in _PNG_ORIENTATION):
            return image.size
        if image.format in ("JPEG", "WEBP"):
            width, height = image.size
            turned = image.getexif().get(ExifTags.Base.Orientation) in _SIDEWAYS
            return (height, width) if turned else (width, height)
    return decode_image(data, where).size


@contextmanager
def _opened(data: bytes, where: str, otherwise: str = LEAVE_OUT) -> Iterator[Image.Image]:
    """An image whose header is read. Errors of Pillow within the block become UserErrors."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            _check_size(image, where, otherwise)
            yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        pixels = re.search(r"\d+", str(error))  # Pillow says how many before it says width and height
        raise UserError(
            f"{where}: the image has {pixels[0] if pixels else 'more'} pixels, over the limit of {MAX_PIXELS} in all. "
            f"Scale it down or {otherwise}"
        ) from None
    except UnidentifiedImageError:
        raise UserError(
            f"{where}: these {len(data)} bytes are no image that Pillow can read (they start with {data[:16]!r}). "
            f"Convert it to PNG or JPEG, or {otherwise}"
        ) from None
    except _BROKEN as error:
        raise UserError(
            f"{where}: the image is damaged ({len(data)} bytes; {type(error).__name__}: {error}). "
            f"Replace the file or {otherwise}"
        ) from error


def _check_size(image: Image.Image, where: str, otherwise: str) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise UserError(
            f"{where}: the image has {width} x {height} pixels, over the limit of {MAX_PIXELS} in all. "
            f"Scale it down or {otherwise}"
        )


def _levels(image: Image.Image, where: str, otherwise: str) -> tuple[float, float] | None:
    """Black and white of grey with more than 8 bits; None for any other image.

    They are what the file states, else 0 and the largest number of its type. Raises UserError where these cannot be
    meant: no range (floats), numbers below black, or all in the darkest quarter (12 bits in 16).
    """
    if not image.mode.startswith("I") and image.mode != "F":
        return None
    import numpy as np  # few images need it, and workers of environments start faster

    numbers = np.asarray(image)
    least, most = float(numbers.min()), float(numbers.max())
    tags: Any = getattr(image, "tag_v2", {})
    stated = [_number(tags, *codes) for codes in (_BLACK_TAGS, _WHITE_TAGS)]
    is_signed = _number(tags, ExifTags.Base.SampleFormat) == 2
    bits = 16 if image.mode.startswith("I;16") or image.format == "PPM" else 32
    bits = int(_number(tags, ExifTags.Base.BitsPerSample) or bits)
    black, white = stated[0] or 0.0, stated[1] or float(2 ** (bits - is_signed) - 1)
    if stated[1] is None and image.mode == "F":
        problem = "and the file does not say which of them is white"
    elif stated[1] is None and (least < 0 or 0 < most < white / 4):
        problem = f"where black is 0 and white {white:g}, so it would be shown wrong"
    elif not math.isfinite(most - least) or white <= black:
        problem = f"which cannot be scaled ({black:g} is black, {white:g} white)"
    else:
        white_is_zero = tags.get(ExifTags.Base.PhotometricInterpretation) == 0
        return (white, black) if white_is_zero else (black, white)
    kind = "floats" if image.mode == "F" else f"whole numbers of {bits} bits"
    raise UserError(
        f"{where}: the image's grey values are {kind} from {least:g} to {most:g}, {problem}. Save it as a PNG of 8 "
        f"bits, scaled to 0..255, or {otherwise}"
    )


def _number(tags: Any, *codes: int) -> float | None:
    """First of the TIFF tags that is there, of its first channel."""
    found = [tags[code] for code in codes if code in tags]
    return None if not found else float(found[0][0] if isinstance(found[0], tuple) else found[0])


def _as_grey8(image: Image.Image, black: float, white: float) -> Image.Image:
    import numpy as np

    numbers = np.asarray(image)
    scaled = (numbers.astype(np.float32) - black) * (255 / (white - black))
    grey = Image.fromarray(np.rint(scaled.clip(0, 255)).astype(np.uint8))
    if isinstance(clear := image.info.get("transparency"), int):
        grey.putalpha(Image.fromarray((numbers != clear).astype(np.uint8) * 255))
    return grey


def _as_rgb(image: Image.Image) -> Image.Image:
    if "A" in image.getbands() or "transparency" in image.info:
        layers = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers)
    return image.convert("RGB")


def load_image_bytes(value: Any, base_dir: Path, where: str) -> bytes:
    """Encoded bytes of one image as data sets hold it, with a header that was read; no pixel is decoded.

    Accepts a path (relative ones below `base_dir`), encoded bytes, base64 text or a `data:` URI of them, the `datasets`
    library's `{"bytes": ..., "path": ...}`, or an image of Pillow. Raises UserError for what is no image, or too large.
    """
    data = _encoded_bytes(value, base_dir, where)
    with _opened(data, where):
        return data


def _encoded_bytes(value: Any, base_dir: Path, where: str) -> bytes:
    if isinstance(value, dict) and value.get("bytes") is not None:
        value = value["bytes"]
    elif isinstance(value, dict) and value.get("path"):
        value = value["path"]
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Image.Image):
        buffer = io.BytesIO()
        value.save(buffer, "PNG" if value.mode in _PNG_MODES else "TIFF")
        return buffer.getvalue()
    if isinstance(value, str | Path) and str(value):
        return _read(str(value), base_dir, where)
    raise UserError(
        f"{where}: {type(value).__name__} {str(value)[:60]!r} is no image. Expected a path, encoded bytes or "
        '{"bytes": ..., "path": ...}; check data.image_key'
    )


def _read(name: str, base_dir: Path, where: str) -> bytes:
    if is_inline(name):
        return _decoded(name, where)
    name = name.removeprefix("file://")
    if "://" in name:
        raise UserError(f"{where}: {name[:80]!r} is an address, not a file. Download the images and give their paths")
    path = base_dir / name
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(
            f"{where}: there is no image {path}: {file_hint(path)} "
            "Relative paths start at the folder of the data file, or at data.image_dir if that is set"
        ) from None
    except (IsADirectoryError, NotADirectoryError, PermissionError, ValueError) as error:
        raise UserError(f"{where}: cannot read the image {path}: {error}") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UserError(f"{where}: {name[:80]!r} ... is no file name") from None
        raise BadStateError(f"{where}: cannot read the image {path}: {error}. The disk fails, not the row") from error


def is_inline(text: str) -> bool:
    """True for a `data:` URI, or for the base64 of an image, which no file is named like."""
    return text.startswith("data:") or (text.startswith(_BASE64_STARTS) and _BASE64.fullmatch(text) is not None)


def _decoded(text: str, where: str) -> bytes:
    head, comma, payload = text.partition(",") if text.startswith("data:") else ("data:;base64", ",", text)
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("it is not written as data:image/png;base64,...")
        return base64.b64decode("".join(payload.split()), validate=True)
    except ValueError as error:
        raise UserError(f"{where}: {text[:40]!r}... cannot be decoded: {error}. Write its bytes in base64") from None


def load_videos(value: Any, base_dir: Path, row_id: str) -> list[list[bytes]]:
    """Encoded bytes of the frames of each of a row's videos. Raises UserError naming row, video and frame."""
    return [
        _frames(video, base_dir, f"row {row_id}, video {n}") for n, video in enumerate(_list(value, f"row {row_id}"))
    ]


def _frames(video: Any, base_dir: Path, where: str) -> list[bytes]:
    frames = [load_image_bytes(item, base_dir, f"{where}, frame {n}") for n, item in enumerate(_list(video, where))]
    if not frames:
        raise UserError(f"{where}: it has no frames. Leave the video or the row out")
    return frames


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list | None):
        raise UserError(f"{where}: {type(value).__name__} {str(value)[:60]!r} is no list. {VIDEO_FIX}")
    return value or []
