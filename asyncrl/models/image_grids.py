"""Image sizes of the Qwen-VL image processors: their limits, and the grids that follow without a pixel."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError

MEASURED_PROCESSORS = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor")
"""Processors whose grids and token ids are tested to be those that come of the pixels."""
_IMAGE_PROCESSOR = "transformers.models.qwen2_vl.image_processing_qwen2_vl.Qwen2VLImageProcessor"


class ImageGrids:
    """The resizing arithmetic of an image processor."""

    def __init__(self, image_processor: Any):
        self._settings = image_processor
        self._smart_resize = import_module(type(image_processor).__module__).smart_resize

    @classmethod
    def of(cls, processor: Any) -> ImageGrids | None:
        """Return the arithmetic of a processor, or None where it is not one of MEASURED_PROCESSORS as released."""
        part: Any = getattr(processor, "image_processor", None)
        return cls(part) if _counts_pixels(part) and type(processor).__name__ in MEASURED_PROCESSORS else None

    def grids(self, sizes: Sequence[tuple[int, int]]) -> np.ndarray:
        """[images, 3] int32 (temporal, height, width in patches) for (width, height) in pixels.

        Raises ValueError for a shape that the processor refuses.
        """
        settings = self._settings
        patch, size = settings.patch_size, settings.size
        grids = np.ones((len(sizes), 3), np.int32)
        for grid, (width, height) in zip(grids, sizes, strict=True):
            resized = self._smart_resize(
                height,
                width,
                factor=patch * settings.merge_size,
                min_pixels=size["shortest_edge"],
                max_pixels=size["longest_edge"],
            )
            grid[1:] = np.asarray(resized) // patch
        return grids


def limit_pixels(processor: Any, config: ModelConfig) -> None:
    """Give the image processor the limits of `model.min_pixels` and `model.max_pixels`, where they are set.

    transformers keeps both in `size`, as edges, but they are numbers of pixels. Raises UserError for a processor that
    does not resize by numbers of pixels, and for limits that no image is within.
    """
    given = " and ".join(f"model.{name} = {value}" for name, value in config.pixel_limits.items())
    if not given:
        return
    part: Any = getattr(processor, "image_processor", None)
    if not _counts_pixels(part):
        found = "no image processor" if part is None else f"a {type(part).__name__} that does not resize by them"
        raise UserError(
            f"{given}: these are limits of the Qwen-VL image processors, and {config.path} has {found}. Leave "
            "model.min_pixels and model.max_pixels out; other processors' sizes stand in preprocessor_config.json"
        )
    least = config.min_pixels or part.size["shortest_edge"]
    most = config.max_pixels or part.size["longest_edge"]
    token = (part.patch_size * part.merge_size) ** 2
    if most < max(least, token):
        raise UserError(
            f"{given}: with what {config.path} says, images would have {least} to {most} pixels, and a token stands "
            f"for {token}. Set model.max_pixels={max(least, token)} or more, or a smaller model.min_pixels"
        )
    part.size = type(part.size)(shortest_edge=least, longest_edge=most)


def _counts_pixels(image_processor: Any) -> bool:
    """True for the image processor of the Qwen-VL families, if it resizes at all."""
    part = type(image_processor)
    return f"{part.__module__}.{part.__qualname__}" == _IMAGE_PROCESSOR and bool(image_processor.do_resize)
