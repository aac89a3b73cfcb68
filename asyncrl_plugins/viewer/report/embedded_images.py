"""Embed images of a run directory as data URIs: small enough for a page, and within a budget for all of them."""

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
"""Size of all images of a page, before base64."""
LARGEST_SIDE = 384
KEPT_BYTES = 24 << 10
"""A file up to this size, and of no more pixels, is embedded as it is."""
QUALITY = 82
_HASH = re.compile(r"[0-9a-f]{8,128}")
_TYPES = {"png": "image/png", "jpg": "image/jpeg", "webp": "image/webp"}


@dataclass(frozen=True)
class EmbeddedImage:
    uri: str = ""
    """Empty where there is no image to show."""
    width: int = 0
    height: int = 0
    """Size of the original, in pixels."""
    problem: str = ""


class EmbeddedImages:
    """Reads each image of a run once, and counts it once."""

    def __init__(self, run_dir: Path, budget_bytes: int = BUDGET_BYTES):
        self._folder = run_dir / IMAGES_FOLDER
        self._left = budget_bytes
        self._known: dict[str, EmbeddedImage] = {}

    def get(self, digest: object) -> EmbeddedImage:
        """Return the image by the hash that a sample names."""
        if not isinstance(digest, str) or not _HASH.fullmatch(digest):
            return EmbeddedImage(problem="not an image's hash")
        if digest not in self._known:
            self._known[digest] = self._read(digest)
        return self._known[digest]

    def _read(self, digest: str) -> EmbeddedImage:
        file = next(self._folder.glob(f"{digest}.*"), None)
        if file is None:
            return EmbeddedImage(problem="not in images/")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow warns of odd metadata; too many pixels are refused
                image = decode_image(data := file.read_bytes(), file.name)
        except OSError as problem:
            return EmbeddedImage(problem=problem.strerror or "unreadable")
        except UserError:
            return EmbeddedImage(problem="damaged, or no image")
        width, height = image.size
        small, kind = _shrink(image, data)
        if len(small) > self._left:
            return EmbeddedImage(width=width, height=height, problem="left out: image budget used up")
        self._left -= len(small)
        return EmbeddedImage(f"data:{kind};base64,{base64.b64encode(small).decode()}", width, height)


def _shrink(image: Image.Image, data: bytes) -> tuple[bytes, str]:
    kind = _TYPES.get(image_extension(data))
    if kind and len(data) <= KEPT_BYTES and max(image.size) <= LARGEST_SIDE:
        return data, kind
    image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return file.getvalue(), "image/jpeg"
