"""Families that cut images into tiles of one size, or write other tokens among theirs: one class for each.

A tile is an image to the vision tower. What stands for an image is text that the family's processor writes, with
placeholders, fences and line breaks, so that the whole prompt is tokenised after it has been put there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from PIL.Image import Image

from asyncrl.errors import UserError
from asyncrl.processing.image_grids import (
    ImageGrids,
    Inputs,
    SeenImages,
    Tokenize,
    one_size,
    rows_apart,
)


class WrittenImages(ImageGrids):
    """Images in the place of which the processor writes text. The first number of a grid is that of its tiles."""

    PROCESSOR: ClassVar[str]

    @classmethod
    def of(cls, processor: Any) -> ImageGrids | None:
        known = type(processor).__name__ == cls.PROCESSOR and cls._is_known(processor.image_processor)
        return cls(processor) if known else None

    @classmethod
    def _is_known(cls, settings: Any) -> bool:
        """Return whether every tile has the one size of the vision tower."""
        return bool(settings.do_resize and one_size(settings))

    @property
    def _tile(self) -> tuple[int, int]:
        """Height and width of a tile in pixels."""
        size = one_size(self._processor.image_processor)
        assert size is not None, "else it is refused"
        return size

    def _written(self, grids: np.ndarray) -> list[str]:
        """Placeholder text of each image, by the processor's own method."""
        facts = self._facts(grids)
        return [self._processor.replace_image_token(facts, number) for number in range(len(grids))]

    def _facts(self, grids: np.ndarray) -> dict[str, Any]:
        """Inputs of that method from the image processor's output."""
        raise NotImplementedError

    @property
    def _image_token(self) -> str:
        """Text of the token that an image's features take the place of."""
        return self._processor.image_token

    def tokens(self, grids: np.ndarray) -> np.ndarray:
        return np.asarray([text.count(self._image_token) for text in self._written(grids)], np.int64)

    def expand(self, text: str, unexpanded: np.ndarray, grids: np.ndarray, ids_of: Tokenize) -> np.ndarray:
        if text.count(self._processor.image_token) != len(grids):
            return unexpanded
        (expanded,), _ = self._processor.get_text_with_replacements([text], self._written(grids))
        return np.asarray(ids_of(expanded), np.int32)

    def describe(self, grid: Sequence[int]) -> str:
        return f"{grid[0]} tile(s)"

    @staticmethod
    def patches(grids: np.ndarray, vision_config: Any) -> int:
        sides = [np.atleast_1d(np.asarray(size)) for size in (vision_config.image_size, vision_config.patch_size)]
        side = sides[0] // sides[1]
        return int(grids[:, 0].sum() * np.broadcast_to(side, 2).prod())


class SquareImages(WrittenImages):
    """Families whose vision tower sees each image or tile as a square by itself, so that its features can be kept."""

    @staticmethod
    def apart(inputs: Mapping[str, torch.Tensor]) -> list[Inputs] | None:
        return rows_apart(inputs)

    @staticmethod
    def joined(features: list[torch.Tensor]) -> Any:
        return torch.stack(features)


class Gemma3Images(SquareImages):
    """Gemma 3: one square each (pan-and-scan is off, as in its processor's own call), whose tokens see each other in
    both directions. Grids: 1, height, width of the square in pixels."""

    PROCESSOR = "Gemma3Processor"
    OPTIONS: ClassVar[dict[str, Any]] = {"return_tensors": "pt", "do_pan_and_scan": False}
    BOTH_WAYS = True

    @property
    def _image_token(self) -> str:
        return self._processor.tokenizer.image_token

    def grids(self, sizes: Sequence[tuple[int, int]]) -> np.ndarray:
        return np.tile(np.asarray([1, *(one_size(self._processor.image_processor) or ())], np.int32), (len(sizes), 1))

    def made(self, output: Mapping[str, Any]) -> np.ndarray:
        pixels = output["pixel_values"]
        return np.tile(np.asarray([1, *pixels.shape[-2:]], np.int32), (len(pixels), 1))

    def _facts(self, grids: np.ndarray) -> dict[str, Any]:
        return {"num_crops": [0] * len(grids)}

    @staticmethod
    def model_inputs(pixels: torch.Tensor, prompts: Sequence[SeenImages], token_types: torch.Tensor) -> Inputs:
        return {"pixel_values": pixels, "token_type_ids": token_types}


class InternVLImages(SquareImages):
    """InternVL: tiles of the best aspect ratio, and the whole image once more. Grids: tiles, height, width of a tile in
    pixels."""

    PROCESSOR = "InternVLProcessor"
    OPTIONS: ClassVar[dict[str, Any]] = {"return_tensors": "pt", "crop_to_patches": True}

    def grids(self, sizes: Sequence[tuple[int, int]]) -> np.ndarray:
        part = self._processor.image_processor
        return self._with_size(part.get_number_of_image_patches(h, w, {"crop_to_patches": True}) for w, h in sizes)

    def made(self, output: Mapping[str, Any]) -> np.ndarray:
        return self._with_size(int(tiles) for tiles in output["num_patches"])

    def _with_size(self, tiles: Any) -> np.ndarray:
        return np.asarray([(number, *self._tile) for number in tiles], np.int32).reshape(-1, 3)

    def _facts(self, grids: np.ndarray) -> dict[str, Any]:
        return {"num_patches": grids[:, 0].tolist()}


class Idefics3Images(WrittenImages):
    """Idefics3 and SmolVLM: rows and columns of tiles, each with a fence, and the whole image once more. Grids: tiles,
    rows, columns; 1, 0, 0 for an image that is not cut."""

    PROCESSOR = "Idefics3Processor"
    OPTIONS: ClassVar[dict[str, Any]] = {"return_tensors": "pt", "return_row_col_info": True}

    @classmethod
    def _is_known(cls, settings: Any) -> bool:
        return bool(settings.do_resize)

    def grids(self, sizes: Sequence[tuple[int, int]]) -> np.ndarray:
        part = self._processor.image_processor
        found = [part.get_number_of_image_patches(height, width, {}) for width, height in sizes]
        return np.asarray([(max(tiles, 1), rows, cols) for tiles, rows, cols in found], np.int32).reshape(-1, 3)

    def made(self, output: Mapping[str, Any]) -> np.ndarray:
        rows, columns = (np.asarray(output[name], np.int32).reshape(-1) for name in ("rows", "cols"))
        return np.stack([rows * columns + 1, rows, columns], axis=1)

    def _arranged(self, images: Sequence[Image]) -> Any:
        return [list(images)]

    def _pixels(self, output: Mapping[str, Any]) -> torch.Tensor:
        """[tiles, C, H, W]. All pixels of a tile are the image's: the mask says nothing, and the model needs none."""
        if not bool(output["pixel_attention_mask"].all()):
            raise UserError(
                "tiles of this Idefics3ImageProcessor have several sizes: set do_resize, and max_image_size, in its "
                "preprocessor_config.json as the released models have them"
            )
        return output["pixel_values"][0]

    def _facts(self, grids: np.ndarray) -> dict[str, Any]:
        return {"rows": [grids[:, 1].tolist()], "cols": [grids[:, 2].tolist()]}

    @staticmethod
    def model_inputs(pixels: torch.Tensor, prompts: Sequence[SeenImages], token_types: torch.Tensor) -> Inputs:
        return {"pixel_values": pixels[None]}


class SmolVLMImages(Idefics3Images):
    """Idefics3's arithmetic under another name."""

    PROCESSOR = "SmolVLMProcessor"


class LlavaNextImages(WrittenImages):
    """LLaVA-NeXT: the whole image, and tiles of the best of some resolutions, whose padding is left out. Grids: tiles,
    and the image's own height and width in pixels."""

    PROCESSOR = "LlavaNextProcessor"
    OPTIONS: ClassVar[dict[str, Any]] = {"do_pad": False}

    def grids(self, sizes: Sequence[tuple[int, int]]) -> np.ndarray:
        return np.asarray([(self._tiles(w, h), h, w) for w, h in sizes], np.int32).reshape(-1, 3)

    def _tiles(self, width: int, height: int) -> int:
        from transformers.image_processing_utils import select_best_resolution

        chosen = select_best_resolution((height, width), self._processor.image_processor.image_grid_pinpoints)
        return 1 + int(np.prod([-(-side // tile) for side, tile in zip(chosen, self._tile, strict=True)]))

    def made(self, output: Mapping[str, Any]) -> np.ndarray:
        tiles = [len(pixels) for pixels in output["pixel_values"]]
        return np.asarray([(n, *size) for n, size in zip(tiles, output["image_sizes"], strict=True)], np.int32)

    def _pixels(self, output: Mapping[str, Any]) -> torch.Tensor:
        return torch.cat(list(output["pixel_values"]))

    def _facts(self, grids: np.ndarray) -> dict[str, Any]:
        tile = torch.empty((3, *self._tile), device="meta")  # of which the shape alone is read
        return {"image_sizes": grids[:, 1:].tolist(), "pixel_values": [[tile]], "batch_num_images": [len(grids)]}

    @staticmethod
    def model_inputs(pixels: torch.Tensor, prompts: Sequence[SeenImages], token_types: torch.Tensor) -> Inputs:
        sizes = np.concatenate([prompt.image_grids[:, 1:] for prompt in prompts])
        return {"pixel_values": pixels, "image_sizes": torch.from_numpy(sizes).long()}


class LlavaOnevisionImages(LlavaNextImages):
    """LLaVA-OneVision: LLaVA-NeXT's tiles for a prompt of one image; of several each is one tile."""

    PROCESSOR = "LlavaOnevisionProcessor"

    def grids(self, sizes: Sequence[tuple[int, int]]) -> np.ndarray:
        grids = super().grids(sizes)
        if len(sizes) > 1:
            grids[:, 0] = 1
        return grids

    def _arranged(self, images: Sequence[Image]) -> Any:
        return [list(images)]

    @staticmethod
    def model_inputs(pixels: torch.Tensor, prompts: Sequence[SeenImages], token_types: torch.Tensor) -> Inputs:
        numbers = torch.tensor([len(prompt.image_grids) for prompt in prompts])
        return {**LlavaNextImages.model_inputs(pixels, prompts, token_types), "batch_num_images": numbers}


class Mistral3Images(WrittenImages):
    """Mistral 3 (Pixtral's processor): one piece at its own aspect ratio, a line break behind each row of tokens.
    Grids: 1, height and width in pixels. Pixels of a prompt's images are one flat list, as no two have one size."""

    PROCESSOR = "PixtralProcessor"

    @classmethod
    def _is_known(cls, settings: Any) -> bool:
        return bool(settings.do_resize and settings.size.get("longest_edge") and not settings.do_center_crop)

    @property
    def _side(self) -> int:
        """Pixels of the side of what one token stands for."""
        return self._processor.patch_size * self._processor.spatial_merge_size

    def grids(self, sizes: Sequence[tuple[int, int]]) -> np.ndarray:
        from transformers.models.pixtral.image_processing_pixtral import get_resize_output_image_size

        most = self._processor.image_processor.size["longest_edge"]
        pixel = np.zeros((3, 1, 1), np.uint8)  # of an image the function reads the shape alone
        images = [np.broadcast_to(pixel, (3, height, width)) for width, height in sizes]
        found = [get_resize_output_image_size(image, (most, most), (self._side, self._side)) for image in images]
        return np.asarray([(1, *size) for size in found], np.int32).reshape(-1, 3)

    def process(self, images: Sequence[Image]) -> tuple[torch.Tensor, np.ndarray]:
        output = self._processor.image_processor(images=list(images), patch_size=self._side, do_pad=False)
        flat = [torch.as_tensor(pixels).flatten() for pixels in output["pixel_values"]]
        return torch.cat(flat), self.made(output)

    def made(self, output: Mapping[str, Any]) -> np.ndarray:
        return np.asarray([(1, *size) for size in output["image_sizes"]], np.int32).reshape(-1, 3)

    def _facts(self, grids: np.ndarray) -> dict[str, Any]:
        return {"image_sizes": grids[:, 1:].tolist()}

    def describe(self, grid: Sequence[int]) -> str:
        return "{1} x {2} pixels".format(*grid)

    @staticmethod
    def model_inputs(pixels: torch.Tensor, prompts: Sequence[SeenImages], token_types: torch.Tensor) -> Inputs:
        sizes = np.concatenate([prompt.image_grids[:, 1:] for prompt in prompts])
        highest, widest = sizes.max(axis=0).tolist()
        images = [
            torch.nn.functional.pad(flat.view(3, height, width), (0, widest - width, 0, highest - height))
            for flat, (height, width) in zip(pixels.split((3 * sizes.prod(axis=1)).tolist()), sizes, strict=True)
        ]
        return {"pixel_values": torch.stack(images), "image_sizes": torch.from_numpy(sizes).long()}

    @staticmethod
    def patches(grids: np.ndarray, vision_config: Any) -> int:
        return int((grids[:, 1:] // vision_config.patch_size).prod(axis=1).sum())


class Llama4Images(WrittenImages):
    """Llama 4: rows and columns of tiles of the best canvas, a separator behind each, and the whole image once more.
    Grids: tiles, rows, columns; 1, 1, 1 for an image that is not cut. Its processor rounds pixels to bfloat16."""

    PROCESSOR = "Llama4Processor"

    @property
    def _image_token(self) -> str:
        return self._processor.img_patch_token

    def grids(self, sizes: Sequence[tuple[int, int]]) -> np.ndarray:
        from transformers.models.llama4 import image_processing_llama4 as processing

        part, (tile, _) = self._processor.image_processor, self._tile
        canvases = torch.tensor(processing.find_supported_resolutions(part.max_patches, part.size))
        found = [
            processing.get_best_fit((height, width), canvases, resize_to_max_canvas=part.resize_to_max_canvas)
            for width, height in sizes
        ]
        return self._with_tiles([np.asarray(canvas) // tile for canvas in found])

    def made(self, output: Mapping[str, Any]) -> np.ndarray:
        return self._with_tiles(output["aspect_ratios"])

    @staticmethod
    def _with_tiles(ratios: Iterable[np.ndarray | torch.Tensor]) -> np.ndarray:
        pairs = [ratio.tolist() for ratio in ratios]
        return np.asarray([(r * c + (r * c > 1), r, c) for r, c in pairs], np.int32).reshape(-1, 3)

    def _facts(self, grids: np.ndarray) -> dict[str, Any]:
        tile = torch.empty((3, *self._tile), device="meta")  # of which the shape alone is read
        return {"aspect_ratios": grids[:, 1:].tolist(), "pixel_values": [tile]}


class Lfm2VlImages(WrittenImages):
    """LFM2-VL: rows and columns of square tiles and the whole image at its own aspect ratio, or that alone.

    Grids: `_code` of rows, columns and a tile's side, height and width of the whole, all in patches. Pixels of a
    prompt's images are one list of patches: tiles and images have different numbers of them.
    """

    PROCESSOR = "Lfm2VlProcessor"
    OPTIONS: ClassVar[dict[str, Any]] = {"return_tensors": "pt", "return_row_col_info": True}
    MOST_TILES = 100

    @classmethod
    def _is_known(cls, settings: Any) -> bool:
        """Return whether an image that is cut has tiles, and comes whole once more: else its text does not fit."""
        cut = settings.min_tiles > 1 and settings.max_tiles < cls.MOST_TILES and settings.use_thumbnail
        return bool(settings.do_resize and settings.do_pad and (cut or not settings.do_image_splitting))

    @property
    def _side(self) -> int:
        """Patches of a tile's side."""
        part = self._processor.image_processor
        return part.tile_size // part.encoder_patch_size

    def _code(self, rows: int, columns: int) -> int:
        return (self._side * self.MOST_TILES + rows) * self.MOST_TILES + columns

    @classmethod
    def _decoded(cls, grids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, columns and a tile's side of each image."""
        rest, columns = np.divmod(grids[:, 0], cls.MOST_TILES)
        side, rows = np.divmod(rest, cls.MOST_TILES)
        return rows, columns, side

    def grids(self, sizes: Sequence[tuple[int, int]]) -> np.ndarray:
        part = self._processor.image_processor
        names = ("max_image_tokens", "encoder_patch_size", "downsample_factor")
        limits = {name: getattr(part, name) for name in names}
        found: list[tuple[int, int, int]] = []
        for width, height in sizes:
            rows = columns = 1
            if part.do_image_splitting and part._is_image_too_large(
                height, width, max_pixels_tolerance=part.max_pixels_tolerance, **limits
            ):
                columns, rows, *_ = part._get_grid_layout(height, width, part.min_tiles, part.max_tiles, part.tile_size)
            whole = part.smart_resize(height, width, min_image_tokens=part.min_image_tokens, **limits)
            found.append((self._code(rows, columns), *(pixels // part.encoder_patch_size for pixels in whole[::-1])))
        return np.asarray(found, np.int32).reshape(-1, 3)

    def made(self, output: Mapping[str, Any]) -> np.ndarray:
        cut = zip(*(np.asarray(output[name]).tolist() for name in ("image_rows", "image_cols")), strict=True)
        whole = np.asarray(output["image_sizes"]) // self._processor.image_processor.encoder_patch_size
        return np.asarray([(self._code(*c), *size) for c, size in zip(cut, whole, strict=True)], np.int32)

    def _pixels(self, output: Mapping[str, Any]) -> torch.Tensor:
        """[patches, features] without padding."""
        return output["pixel_values"][output["pixel_attention_mask"].bool()]

    def _written(self, grids: np.ndarray) -> list[str]:
        rows, columns, _ = self._decoded(grids)
        sizes = (grids[:, 1:] * self._processor.image_processor.encoder_patch_size).tolist()
        facts = {"image_rows": rows.tolist(), "image_cols": columns.tolist(), "image_sizes": sizes}
        return [
            self._processor.replace_image_token(facts, number, use_image_special_tokens=True)
            for number in range(len(grids))
        ]

    def describe(self, grid: Sequence[int]) -> str:
        rows, columns, _ = self._decoded(np.asarray([grid]))
        return f"{rows[0]} x {columns[0]} tile(s), {grid[1]} x {grid[2]} patches of the whole"

    @classmethod
    def _shapes(cls, grids: np.ndarray) -> list[tuple[int, int]]:
        """Rows and columns of patches of each tile, and of each whole image."""
        found: list[tuple[int, int]] = []
        for rows, columns, side, (_, height, width) in zip(*cls._decoded(grids), grids.tolist(), strict=True):
            tiles = int(rows * columns) if rows * columns > 1 else 0
            found += [(int(side), int(side))] * tiles + [(height, width)]
        return found

    @staticmethod
    def model_inputs(pixels: torch.Tensor, prompts: Sequence[SeenImages], token_types: torch.Tensor) -> Inputs:
        shapes = torch.tensor(Lfm2VlImages._shapes(np.concatenate([prompt.image_grids for prompt in prompts])))
        lengths = shapes.prod(1)
        pieces = pixels.split(lengths.tolist())
        padded = torch.nn.utils.rnn.pad_sequence(list(pieces), batch_first=True)
        mask = (torch.arange(padded.shape[1]) < lengths[:, None]).int()
        return {"pixel_values": padded, "pixel_attention_mask": mask, "spatial_shapes": shapes}

    @staticmethod
    def apart(inputs: Mapping[str, torch.Tensor]) -> list[Inputs] | None:
        shapes = inputs["spatial_shapes"].split(1)
        pieces = [
            row[:, : int(shape.prod())] for row, shape in zip(inputs["pixel_values"].split(1), shapes, strict=True)
        ]
        return [
            {
                "pixel_values": piece,
                "pixel_attention_mask": piece.new_ones(piece.shape[:2], dtype=torch.int),
                "spatial_shapes": shape,
            }
            for piece, shape in zip(pieces, shapes, strict=True)
        ]

    @staticmethod
    def patches(grids: np.ndarray, vision_config: Any) -> int:
        return sum(height * width for height, width in Lfm2VlImages._shapes(grids))
