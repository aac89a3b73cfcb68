"""Sizes of images that an environment shows, and those that it cannot."""

from __future__ import annotations

import io
import struct
import zlib

import pytest
from PIL import Image

from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.interface import ToolError, observe, png_bytes


@pytest.mark.parametrize(
    ("size", "fitted"),
    [
        ((1, 1), (56, 56)),
        ((300, 200), (300, 200)),
        ((56, 3584), (56, 3584)),
        ((1000, 1000), (448, 448)),
        ((20_000, 20_000), (448, 448)),
        ((20, 30), (56, 84)),
        ((10, 1000), None),
        ((1, 201), None),
        ((0, 5), None),
    ],
)
def test_sizes_under_the_rule(size: tuple[int, int], fitted: tuple[int, int] | None) -> None:
    rule = ImageRule(unit=28, max_pixels=200_704)
    if fitted is None:
        with pytest.raises(ToolError, match="cannot be shown"):
            rule.fitted_size(*size)
    else:
        assert rule.fitted_size(*size) == fitted


def test_bytes_that_fit_stay_as_they_are_and_bad_ones_are_refused_before_they_are_decoded() -> None:
    rule = ImageRule(unit=28)
    buffer = io.BytesIO()
    Image.new("RGB", (100, 100), "red").save(buffer, "JPEG")
    assert rule.fit(buffer.getvalue()) == buffer.getvalue()
    header = b"IHDR" + struct.pack(">IIBBBBB", 20_000, 20_000, 8, 0, 0, 0, 0)
    huge = b"\x89PNG\r\n\x1a\n\0\0\0\r" + header + struct.pack(">I", zlib.crc32(header)) + b"\0\0\0\0IDAT5\xaf\x06\x1e"
    with pytest.raises(ToolError, match=r"no image can be shown: .*limit"):
        rule.fit(huge)
    with pytest.raises(ToolError, match="no image that Pillow can read"):
        rule.fit(b"<html>not found</html>")
    assert observe(Image.new("L", (1, 1)), "seen").images[0] == png_bytes(Image.new("RGB", (1, 1)))
