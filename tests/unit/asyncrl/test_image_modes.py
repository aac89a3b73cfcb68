"""Grey of more than 8 bits is shown in the range that the file means, or is a bad row that says what it is."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from asyncrl.data.images import decode_image, image_size, load_image_bytes
from asyncrl.errors import UserError

GREY = np.tile(np.linspace(0, 255, 16).astype(np.uint8), (3, 1))
"""[3, 16] from black to white."""
WIDE = GREY.astype(np.uint16) * 257


def encoded(numbers: np.ndarray, kind: str, tags: dict[int, Any] | None = None, **options: Any) -> bytes:
    buffer = io.BytesIO()
    if tags:
        directory = ImageFileDirectory_v2()
        for tag, (number_type, value) in tags.items():
            directory.tagtype[tag] = number_type
            directory[tag] = value
        options["tiffinfo"] = directory
    Image.fromarray(numbers).save(buffer, kind, **options)
    return buffer.getvalue()


def pgm(numbers: np.ndarray, most: int) -> bytes:
    return b"P5\n%d %d\n%d\n" % (numbers.shape[1], numbers.shape[0], most) + numbers.astype(">u2").tobytes()


def float_range(black: float, white: float) -> dict[int, Any]:
    return {340: (11, black), 341: (11, white)}


SHOWN = {
    "png": encoded(WIDE, "PNG"),
    "tiff": encoded(WIDE, "TIFF"),
    "pgm": pgm(WIDE, 65535),
    "pgm of 12 bits": pgm(WIDE >> 4, 4095),
    "pgm of 10 bits": pgm(WIDE >> 6, 1023),
    "int32 of its whole range": encoded(GREY.astype(np.int32) * (2**31 // 256), "TIFF"),
    "12 bits in 16, stated": encoded(WIDE >> 4, "TIFF", {281: (3, 4095)}),
    "int32, stated": encoded(WIDE.astype(np.int32), "TIFF", {281: (3, 65535)}),
    "floats from 0 to 1, stated": encoded(GREY.astype(np.float32) / 255, "TIFF", float_range(0.0, 1.0)),
    "floats from -1 to 1, stated": encoded(GREY.astype(np.float32) / 127.5 - 1, "TIFF", float_range(-1.0, 1.0)),
    "white is zero": encoded(65535 - WIDE, "TIFF", {262: (3, 0)}),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_grey_is_scaled_by_the_range_of_the_file(kind: str) -> None:
    image = decode_image(SHOWN[kind], "row d:0, image 0")
    assert image.mode == "RGB"
    assert image.size == image_size(SHOWN[kind], "x") == (16, 3)
    np.testing.assert_allclose(np.asarray(image)[..., 1], GREY, atol=1)


def test_black_and_transparent_grey_of_16_bits_are_shown() -> None:
    assert decode_image(encoded(WIDE * 0, "PNG"), "x").getextrema() == ((0, 0),) * 3
    clear = decode_image(encoded(WIDE, "PNG", transparency=0), "x")
    assert np.asarray(clear)[0, 0].tolist() == [255, 255, 255], "on white, as other transparent images"
    assert np.asarray(clear)[0, 1].tolist() == [17, 17, 17]


REFUSED = {
    "floats from 0 to 1": (encoded(GREY.astype(np.float32) / 255, "TIFF"), "floats from 0 to 1, and the file does not"),
    "floats to 255": (encoded(GREY.astype(np.float32), "TIFF"), "floats from 0 to 255"),
    "pfm": (b"Pf\n16 3\n-1.0\n" + (GREY.astype("<f4") / 255).tobytes(), "floats from 0 to 1"),
    "12 bits in 16": (encoded(WIDE >> 4, "PNG"), "whole numbers of 16 bits from 0 to 4095, .* white 65535"),
    "10 bits in 16": (encoded(WIDE >> 6, "TIFF"), "from 0 to 1023"),
    "12 bits in a pgm of 16": (pgm(WIDE >> 4, 65535), "from 0 to 4095"),
    "16 bits in 32": (encoded(WIDE.astype(np.int32), "TIFF"), "whole numbers of 32 bits from 0 to 65535"),
    "below black": (encoded(WIDE.astype(np.int32) * 30000 - 70000, "TIFF"), "from -70000 to"),
    "not a number": (encoded(np.full((2, 2), np.nan, np.float32), "TIFF", float_range(0.0, 1.0)), "cannot be scaled"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_grey_of_no_range_is_a_bad_row_that_says_what_it_is(kind: str) -> None:
    data, expected = REFUSED[kind]
    with pytest.raises(UserError, match=rf"row d:0, image 0: .*{expected}.* Save it as a PNG of 8 bits"):
        decode_image(data, "row d:0, image 0")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "1", "CMYK"])
def test_images_of_pillow_are_read_as_they_are(mode: str, tmp_path: Any) -> None:
    image = Image.fromarray(np.stack([GREY] * 3, -1)).convert(mode)
    assert decode_image(load_image_bytes(image, tmp_path, "x"), "x").tobytes() == image.convert("RGB").tobytes()
    with pytest.raises(UserError, match="floats from 0 to 255"):
        decode_image(load_image_bytes(image.convert("L").convert("F"), tmp_path, "x"), "x")
