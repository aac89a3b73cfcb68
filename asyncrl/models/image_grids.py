"""Image grids from image sizes: the arithmetic of the Qwen-VL image processors, which no pixel is needed for."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

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
        is_known = f"{type(part).__module__}.{type(part).__qualname__}" == _IMAGE_PROCESSOR
        return cls(part) if is_known and type(processor).__name__ in MEASURED_PROCESSORS and part.do_resize else None

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
