"""Encoded pictures of noise, the same for a size."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def picture(width: int, height: int, kind: str = "PNG", **options: object) -> bytes:
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=kind, **options)
    return buffer.getvalue()
