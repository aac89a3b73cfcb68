"""Images of a run directory as data URIs: small enough for a page, and within a budget for all of them."""

from __future__ import annotations

import base64
import io
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from asyncrl.data.images import decode_image
from asyncrl.errors import UserError
from asyncrl.telemetry.recorder import IMAGES_FOLDER, image_extension

BUDGET_BYTES = 12 << 20
"""Of all images of a page, before base64."""
LARGEST_SIDE = 384
KEPT_BYTES = 24 << 10
"""A file up to this size and of no more pixels goes in as it is."""
LARGEST_FILE = 64 << 20
QUALITY = 82
_HASH = re.compile(r"[0-9a-f]{8,128}")
_TYPES = {"png": "image/png", "jpg": "image/jpeg", "webp": "image/webp"}


@dataclass(frozen=True)
class Picture:
    uri: str
    """Empty where there is none to show."""
    width: int = 0
    height: int = 0
    """Of the original."""
    problem: str = ""


class Pictures:
    """Each image is read once, and counts once."""

    def __init__(self, run_dir: Path, budget_bytes: int = BUDGET_BYTES):
        self._folder = run_dir / IMAGES_FOLDER
        self._left = budget_bytes
        self._known: dict[str, Picture] = {}

    def get(self, digest: object) -> Picture:
        """By the hash that a sample names."""
        if not isinstance(digest, str) or not _HASH.fullmatch(digest):
            return Picture("", problem="not an image's hash")
        if digest not in self._known:
            self._known[digest] = self._read(digest)
        return self._known[digest]

    def _read(self, digest: str) -> Picture:
        try:
            file = next((file for file in self._folder.iterdir() if file.stem == digest), None)
            if file is None:
                return Picture("", problem="not in images/")
            if file.stat().st_size > LARGEST_FILE:
                return Picture("", problem=f"{file.stat().st_size >> 20} MiB")
            data = file.read_bytes()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's, on odd metadata; too many pixels are refused
                image = decode_image(data, file.name)
        except FileNotFoundError:
            return Picture("", problem="not in images/")
        except OSError as problem:
            return Picture("", problem=problem.strerror or "unreadable")
        except UserError:
            return Picture("", problem="damaged, or no image")
        width, height = image.size
        small, kind = _shrink(image, data)
        if len(small) > self._left:
            return Picture("", width, height, "left out: the page has its fill of images")
        self._left -= len(small)
        return Picture(f"data:{kind};base64,{base64.b64encode(small).decode()}", width, height)


def _shrink(image: Image.Image, data: bytes) -> tuple[bytes, str]:
    kind = _TYPES.get(image_extension(data))
    if kind and len(data) <= KEPT_BYTES and max(image.size) <= LARGEST_SIDE:
        return data, kind
    image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return file.getvalue(), "image/jpeg"
