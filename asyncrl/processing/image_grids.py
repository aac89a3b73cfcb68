"""Patches and tokens that a processor makes of an image of a known size, without a pixel; limits of such sizes.

`ImageGrids` is the contract. Here are the families whose images are one piece each; the plug-in `tiled_images` has
those that cut them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from PIL.Image import Image

from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError
from asyncrl.plugins import ModelFamily, description, descriptions, implementation, installed

MEASURED_PROCESSORS = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor")
"""Processors of varying grids that are tested to be those that come of the pixels."""
_IMAGE_PROCESSOR = "transformers.models.qwen2_vl.image_processing_qwen2_vl.Qwen2VLImageProcessor"

Tokenize = Callable[[str], list[int]]
Inputs = dict[str, torch.Tensor]


class SeenImages(Protocol):
    """Prompt as an image family needs it: the grids of its images."""

    @property
    def image_grids(self) -> np.ndarray: ...


class ImageGrids:
    """Image handling of a family of models, equal for engine and learner: tokens, pixels and inputs of the model.

    Each family is one subclass. A grid is three numbers of an image that all else follows from: the tokens that stand
    for it, and what the model is told of its pixels. It is made of the image's size alone, and compared on the wire.
    """

    OPTIONS: ClassVar[dict[str, Any]] = {"return_tensors": "pt"}
    """Arguments of the image processor: those of the processor's own call."""

    IN_TURNS: ClassVar[bool] = False
    """Images that an environment shows after a turn of the model are tested, too."""

    def __init__(self, processor: Any):
        self._processor = processor

    @classmethod
    def of(cls, processor: Any) -> ImageGrids | None:
        """Return the arithmetic of a processor of this family, or None where its settings are not known here."""
        raise NotImplementedError

    def grids(self, sizes: Sequence[tuple[int, int]]) -> np.ndarray:
        """[images, 3] int32 of the images of one prompt, for (width, height) in pixels.

        Raises ValueError for a shape that the processor refuses.
        """
        raise NotImplementedError

    def of_row(self, sizes: Sequence[tuple[int, int]], row_id: str, first: int = 0) -> np.ndarray:
        """`grids` of a row's images. Raises UserError naming the one of a shape that the processor refuses."""
        try:
            return self.grids(sizes)
        except ValueError as refused:
            if len(sizes) > 1:
                for number, size in enumerate(sizes):
                    self.of_row([size], row_id, number)
            (width, height), *_ = sizes
            raise UserError(
                f"row {row_id}, image {first}: the processor takes no such image, of {width} x {height} pixels: "
                f"{refused}. Crop or pad it, or leave the row out"
            ) from None

    def tokens(self, grids: np.ndarray) -> np.ndarray:
        """[images, 3] -> [images] image tokens that stand for each image of one prompt."""
        raise NotImplementedError

    def expand(self, text: str, unexpanded: np.ndarray, grids: np.ndarray, ids_of: Tokenize) -> np.ndarray:
        """[P] int32 ids of `text` with what stands for each image in the place of its placeholder.

        `unexpanded` [U] are its ids with the placeholders, which stay where they are not as many as the images.
        """
        raise NotImplementedError

    def made(self, output: Mapping[str, Any]) -> np.ndarray:
        """[images, 3] int32: the grids in what the image processor has returned."""
        raise NotImplementedError

    def process(self, images: Sequence[Image]) -> tuple[torch.Tensor, np.ndarray]:
        """Pixels of a prompt's images, which are joined along their first dimension, and the grids that were made."""
        output = self._processor.image_processor(images=self._arranged(images), **self.OPTIONS)
        return self._pixels(output), self.made(output)

    def _arranged(self, images: Sequence[Image]) -> Any:
        return list(images)

    def _pixels(self, output: Mapping[str, Any]) -> torch.Tensor:
        return output["pixel_values"]

    def describe(self, grid: Sequence[int]) -> str:
        """The grid of one image, for people."""
        return "{} x {} x {} patches".format(*grid)

    # --- what the model is told: of the model's family alone, without a processor ------------------

    BOTH_WAYS: ClassVar[bool] = False
    """The tokens of an image see each other in both directions."""

    @classmethod
    def spans(cls, token_types: np.ndarray) -> list[tuple[int, int]]:
        """Places of a prompt whose tokens see each other in both directions: [start, end) of each image."""
        if not cls.BOTH_WAYS:
            return []
        edges = np.flatnonzero(np.diff(np.pad(token_types == 1, 1).astype(np.int8)))
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))

    @staticmethod
    def model_inputs(pixels: torch.Tensor, prompts: Sequence[SeenImages], token_types: torch.Tensor) -> Inputs:
        """Arguments of the model for the joined `pixels` of these prompts' images; `token_types` [rows, P] are those of
        the whole input."""
        return {"pixel_values": pixels}

    @staticmethod
    def apart(inputs: Mapping[str, torch.Tensor]) -> list[Inputs] | None:
        """Split the model's arguments into what its vision tower takes for each image or tile; None where features of
        this family are not kept (`vision_features`)."""
        return None

    @staticmethod
    def joined(features: list[torch.Tensor]) -> Any:
        """Features [tokens, D] of each image or tile, as the model takes those of all."""
        return features

    @staticmethod
    def patches(grids: np.ndarray, vision_config: Any) -> int:
        """Patches that the vision tower computes."""
        return int(grids.prod(axis=1).sum())


class RepeatedPlaceholders(ImageGrids):
    """An image is its placeholder, repeated."""

    IN_TURNS: ClassVar[bool] = True

    def expand(self, text: str, unexpanded: np.ndarray, grids: np.ndarray, ids_of: Tokenize) -> np.ndarray:
        times = np.ones(len(unexpanded), np.int64)
        places = np.flatnonzero(unexpanded == self._processor.image_token_id)
        if len(places) == len(grids):
            times[places] = self.tokens(grids)
        return np.repeat(unexpanded, times)


class PatchGrids(RepeatedPlaceholders):
    """The resizing arithmetic of the Qwen-VL families. Grids: temporal, height, width in patches."""

    def __init__(self, processor: Any):
        super().__init__(processor)
        self._settings = processor.image_processor
        self._smart_resize = import_module(type(self._settings).__module__).smart_resize

    @classmethod
    def of(cls, processor: Any) -> PatchGrids | None:
        """Return the arithmetic of a processor, or None where it is not one of MEASURED_PROCESSORS as released."""
        part: Any = getattr(processor, "image_processor", None)
        return cls(processor) if _counts_pixels(part) and type(processor).__name__ in MEASURED_PROCESSORS else None

    def grids(self, sizes: Sequence[tuple[int, int]]) -> np.ndarray:
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
        return grids.prod(axis=1) // self._settings.merge_size**2

    def made(self, output: Mapping[str, Any]) -> np.ndarray:
        return named_grids(output, "image_grid_thw")

    @staticmethod
    def model_inputs(pixels: torch.Tensor, prompts: Sequence[SeenImages], token_types: torch.Tensor) -> Inputs:
        grids = np.concatenate([prompt.image_grids for prompt in prompts])
        return {"pixel_values": pixels, "image_grid_thw": torch.from_numpy(grids).long()}

    @staticmethod
    def apart(inputs: Mapping[str, torch.Tensor]) -> list[Inputs] | None:
        grids = inputs["image_grid_thw"]
        pixels = inputs["pixel_values"].split(grids.prod(1).tolist())
        return [{"pixel_values": p, "image_grid_thw": g} for p, g in zip(pixels, grids.split(1), strict=True)]


class FixedGrids(RepeatedPlaceholders):
    """LLaVA's arithmetic: each image is resized, and perhaps cropped, to the one size of the vision tower. Grids: 1,
    height, width in patches."""

    def __init__(self, processor: Any, size: tuple[int, int]):
        """`size`: (height, width) in pixels."""
        super().__init__(processor)
        self._patch = int(processor.patch_size)
        self._size = size

    @classmethod
    def of(cls, processor: Any) -> FixedGrids | None:
        """Return the arithmetic of a LLaVA processor, or None where it is another or images keep sizes of their own."""
        if type(processor).__name__ != "LlavaProcessor" or not processor.patch_size:
            return None
        size = one_size(processor.image_processor)
        return cls(processor, size) if size else None

    def grids(self, sizes: Sequence[tuple[int, int]]) -> np.ndarray:
        return self._repeated(len(sizes), *self._size)

    def tokens(self, grids: np.ndarray) -> np.ndarray:
        """[images, 3] -> [images] tokens that stand for each image: its patches, and the tower's class token if that is
        not left out (`vision_feature_select_strategy: default`)."""
        processor = self._processor
        extra = processor.num_additional_image_tokens - (processor.vision_feature_select_strategy == "default")
        return grids.prod(axis=1) + extra

    def made(self, output: Mapping[str, Any]) -> np.ndarray:
        pixels = output.get("pixel_values")
        return self._repeated(0, 0, 0) if pixels is None else self._repeated(len(pixels), *pixels.shape[-2:])

    @staticmethod
    def apart(inputs: Mapping[str, torch.Tensor]) -> list[Inputs] | None:
        return rows_apart(inputs)

    def _repeated(self, images: int, height: int, width: int) -> np.ndarray:
        return np.tile(np.asarray([1, height // self._patch, width // self._patch], np.int32), (images, 1))


FAMILIES: dict[str, type[ImageGrids]] = {
    "llava": FixedGrids,
    "qwen2_vl": PatchGrids,
    "qwen2_5_vl": PatchGrids,
    "qwen3_vl": PatchGrids,
}
"""Image families of the core by `model_type` of the model's configuration. Each is tested against the processor's own
call and the model."""


def family_images(family: str) -> type[ImageGrids] | None:
    """Images of a family that the core or a plug-in knows; None for another."""
    if family in installed("models"):
        return implementation(description("models", family).images)
    return FAMILIES.get(family)


def family_names() -> list[str]:
    """Model types of all known image families."""
    from_plugins = (name for name, part in descriptions("models").items() if isinstance(part, ModelFamily))
    return sorted([*FAMILIES, *from_plugins])


def grids_of(family: str, processor: Any) -> ImageGrids | None:
    """The arithmetic of a folder's processor; None where nothing here knows it."""
    known = family_images(family)
    candidates = [known] if known else [PatchGrids, FixedGrids]
    return next((found for each in candidates if (found := each.of(processor))), None)


def images_of(model: Any) -> type[ImageGrids]:
    """Image description of a model. One that no family here knows, and that places its tokens by grids as the Qwen-VL
    models do, is told what they are."""
    known = family_images(model.config.model_type)
    return known or (PatchGrids if has_grid_positions(model) else ImageGrids)


def has_grid_positions(model: Any) -> bool:
    """True for the Qwen-VL families, whose positions follow from grids; others count tokens."""
    return hasattr(getattr(model, "model", None), "get_rope_index")


def rows_apart(inputs: Mapping[str, torch.Tensor]) -> list[Inputs]:
    """`ImageGrids.apart` where each row of pixels is an image or tile."""
    return [{"pixel_values": pixels} for pixels in inputs["pixel_values"].split(1)]


def named_grids(output: Mapping[str, Any], name: str) -> np.ndarray:
    """[N, 3] int32 that a processor returned under a name; none where it did not."""
    return output[name].to(torch.int32).numpy() if name in output else np.zeros((0, 3), np.int32)


def one_size(image_processor: Any) -> tuple[int, int] | None:
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
