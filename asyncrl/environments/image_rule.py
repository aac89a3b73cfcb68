"""One rule for the size of every image that an environment shows, applied before the image gets its name (its hash)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from PIL import Image

from asyncrl.data.images import MAX_PIXELS, decode_image
from asyncrl.environments.interface import RefusedError, png_bytes
from asyncrl.environments.observation import Message, Observation, Part
from asyncrl.errors import UserError

MAX_ASPECT = 200
"""Longer than this many times its width an image is refused, as by the processors of the Qwen family."""


@dataclass(frozen=True)
class ImageRule:
    """Bounds of an image's size; one outside is scaled (Lanczos) to whole units, near its shape.

    Example:
        ImageRule(unit=28, max_pixels=200_704).fit(Image.new("RGB", (1, 1)))  # PNG bytes of 56 x 56
    """

    unit: int = 28
    """Pixels at the side of one image token: the processor's patch size times its merge size."""
    max_pixels: int = 200_704
    """Largest area (`environment.limits.image_pixels`)."""
    min_pixels: int = 0
    """Smallest area, the processor's own."""

    def fit(self, image: Image.Image | bytes) -> bytes:
        """Encoded bytes of the image within the bounds: PNG, or the given bytes unchanged where they fit.

        Raises RefusedError for bytes that are no image, damaged or too large, and for a shape that never fits.
        """
        try:
            pixels = decode_image(image, "no image can be shown", "show a text") if isinstance(image, bytes) else image
        except UserError as error:
            raise RefusedError(str(error)) from None
        if pixels.width * pixels.height > MAX_PIXELS:  # to scale it takes copies
            raise RefusedError(
                f"an image of {pixels.width} x {pixels.height} pixels cannot be shown: more than {MAX_PIXELS} in all"
            )
        size = self.fitted_size(*pixels.size)
        if size == pixels.size:
            return image if isinstance(image, bytes) else png_bytes(pixels)
        return png_bytes(pixels.convert("RGB").resize(size, Image.Resampling.LANCZOS))

    def fit_observation(self, observation: Observation) -> Observation:
        """The observation with each of its images under the rule. Raises RefusedError."""
        messages = observation.messages
        return Observation(
            tuple(Message(m.role, tuple(self.fit(p) if isinstance(p, bytes) else p for p in m.parts)) for m in messages)
        )

    def shown(self, observation: Observation) -> tuple[Observation, str]:
        """Observation with a text in place of each image that cannot be shown, and the first of these texts."""
        refused: list[str] = []
        messages: list[Message] = []
        for message in observation.messages:
            parts: list[Part] = []
            own = list(message.own)
            for number, part in enumerate(message.parts):
                try:
                    parts.append(self.fit(part) if isinstance(part, bytes) else part)
                except RefusedError as problem:
                    refused.append(f"Error: {problem}")
                    parts.append(refused[-1])
                    own.append(number)
            messages.append(Message(message.role, tuple(parts), tuple(own)))
        return Observation(tuple(messages)), refused[0] if refused else ""

    def fitted_size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height under the rule. Raises RefusedError."""
        shape = f"an image of {width} x {height} pixels cannot be shown"
        short, long, area = min(width, height), max(width, height), width * height
        if short == 0:
            raise RefusedError(f"{shape}: it is empty")
        if long > MAX_ASPECT * short:
            raise RefusedError(f"{shape}: one side is more than {MAX_ASPECT} times the other")
        smallest = 2 * self.unit
        grown = max(1.0, smallest / short, math.sqrt(self.min_pixels / area))
        scale = min(grown, math.sqrt(self.max_pixels / area))
        if scale == 1.0:
            return width, height
        for rounded in (math.ceil, math.floor) if scale > 1.0 else (math.floor,):
            fitted = [max(2, rounded(round(side * scale / self.unit, 6))) * self.unit for side in (width, height)]
            if fitted[0] * fitted[1] <= self.max_pixels:
                return fitted[0], fitted[1]
        raise RefusedError(
            f"{shape}: with at least {smallest} pixels at the shorter side it has more than {self.max_pixels} in all"
        )
