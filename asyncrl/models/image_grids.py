"""Patches and tokens that a processor makes of an image of a known size, without a pixel; limits of such sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch

from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError

MEASURED_PROCESSORS = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor")
"""Processors of varying grids that are tested to be those that come of the pixels."""
_IMAGE_PROCESSOR = "transformers.models.qwen2_vl.image_processing_qwen2_vl.Qwen2VLImageProcessor"


class PatchGrids:
    """The resizing arithmetic of the Qwen-VL families: a grid follows from the image's size."""

    def __init__(self, image_processor: Any):
        self._settings = image_processor
        self._smart_resize = import_module(type(image_processor).__module__).smart_resize

    @classmethod
    def of(cls, processor: Any) -> PatchGrids | None:
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

    def tokens(self, grids: np.ndarray) -> np.ndarray:
        """[images, 3] -> [images] tokens that stand for each image."""
        return grids.prod(axis=1) // self._settings.merge_size**2

    def made(self, output: Mapping[str, Any]) -> np.ndarray:
        """[images, 3] int32: the grids in what the processor has returned."""
        return named_grids(output, "image_grid_thw")


class FixedGrids:
    """LLaVA's arithmetic: each image is resized, and perhaps cropped, to the one size of the vision tower."""

    def __init__(self, processor: Any, size: tuple[int, int]):
        """`size`: (height, width) in pixels."""
        self._processor = processor
        self._patch = int(processor.patch_size)
        self._size = size

    @classmethod
    def of(cls, processor: Any) -> FixedGrids | None:
        """Return the arithmetic of a LLaVA processor, or None where it is another or images keep sizes of their own."""
        if type(processor).__name__ != "LlavaProcessor" or not processor.patch_size:
            return None
        size = _one_size(processor.image_processor)
        return cls(processor, size) if size else None

    def grids(self, sizes: Sequence[tuple[int, int]]) -> np.ndarray:
        """[images, 3] int32 (1, height, width in patches), whatever the sizes are."""
        return self._repeated(len(sizes), *self._size)

    def tokens(self, grids: np.ndarray) -> np.ndarray:
        """[images, 3] -> [images] tokens that stand for each image: its patches, and the tower's class token if that is
        not left out (`vision_feature_select_strategy: default`)."""
        processor = self._processor
        extra = processor.num_additional_image_tokens - (processor.vision_feature_select_strategy == "default")
        return grids.prod(axis=1) + extra

    def made(self, output: Mapping[str, Any]) -> np.ndarray:
        """[images, 3] int32: the grids in what the processor has returned."""
        pixels = output.get("pixel_values")
        return self._repeated(0, 0, 0) if pixels is None else self._repeated(len(pixels), *pixels.shape[-2:])

    def _repeated(self, images: int, height: int, width: int) -> np.ndarray:
        return np.tile(np.asarray([1, height // self._patch, width // self._patch], np.int32), (images, 1))


ImageGrids = PatchGrids | FixedGrids


def image_grids_of(processor: Any) -> ImageGrids | None:
    """Return the arithmetic of a processor's images, or None where this module does not know it."""
    return PatchGrids.of(processor) or FixedGrids.of(processor)


def named_grids(output: Mapping[str, Any], name: str) -> np.ndarray:
    """[N, 3] int32 that a processor returned under a name; none where it did not."""
    return output[name].to(torch.int32).numpy() if name in output else np.zeros((0, 3), np.int32)


def _one_size(image_processor: Any) -> tuple[int, int] | None:
    """(height, width) in pixels that every image gets; None where there is no such size."""
    crops = getattr(image_processor, "do_center_crop", False)
    size: Any = image_processor.crop_size if crops else image_processor.size if image_processor.do_resize else None
    return (size["height"], size["width"]) if size and size.get("height") and size.get("width") else None


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
