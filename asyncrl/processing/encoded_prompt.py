"""A prompt, or a piece of a trajectory, as models and engines take it: token ids, grids, encoded media and pixels."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from asyncrl.data.images import decode_image
from asyncrl.errors import UserError
from protocol.messages import Prompt, Video


def _no_grids() -> np.ndarray:
    return np.zeros((0, 3), np.int32)


@dataclass(frozen=True)
class VideoFrames:
    frames: tuple[bytes, ...]
    """Encoded images, in order."""
    fps: float


@dataclass(frozen=True)
class EncodedPrompt:
    """Tokens and media in the order in which the model reads them. Pixels are there where somebody asked for them."""

    row_id: str
    token_ids: np.ndarray
    """[P] int32, image placeholders expanded."""
    token_types: np.ndarray
    """[P] int32, 1 on image tokens, 2 on video tokens, 0 on text."""
    image_grids: np.ndarray = field(default_factory=_no_grids)
    """[images, 3] int32, see `ImageGrids`; of the Qwen-VL families temporal, height, width in patches."""
    image_hashes: tuple[str, ...] = ()
    """Hashes of the bytes that were encoded here, under any name."""
    images: tuple[bytes, ...] = ()
    """Encoded bytes of the images, for an engine that computes pixels itself."""
    video_grids: np.ndarray = field(default_factory=_no_grids)
    """[videos, 3] int32: temporal, height, width in patches."""
    video_hashes: tuple[str, ...] = ()
    """Hashes of each video's frames as they were encoded here, see `Group.video_hashes`."""
    videos: tuple[VideoFrames, ...] = ()
    """Frames of each video, for such an engine."""
    seconds_per_grid: tuple[float, ...] = ()
    """Seconds between two temporal patches of each video; Qwen2.5-VL spaces their positions by it."""
    unexpanded_ids: np.ndarray | None = None
    """[U] int32 with one placeholder for each image and video, for an engine that expands them; None: `token_ids`."""
    pixel_values: torch.Tensor | None = None
    """[patches, features] of all images; None without images, or without pixels."""
    video_pixel_values: torch.Tensor | None = None
    """[patches, features] of all videos; None without videos, or without pixels."""

    @classmethod
    def of_text(cls, token_ids: np.ndarray, row_id: str = "a turn") -> EncodedPrompt:
        """Tokens without media. `token_ids`: [P]"""
        ids = token_ids.astype(np.int32)
        return cls(row_id, ids, np.zeros_like(ids), unexpanded_ids=ids)

    @property
    def media_tokens(self) -> int:
        return int((self.token_types > 0).sum())

    @property
    def has_pixels(self) -> bool:
        """True where the pixels of all media are there."""
        pairs = ((self.image_grids, self.pixel_values), (self.video_grids, self.video_pixel_values))
        return all(pixels is not None or not len(grids) for grids, pixels in pairs)

    @property
    def nbytes(self) -> int:
        pixels = (self.pixel_values, self.video_pixel_values)
        encoded = (*self.images, *(frame for video in self.videos for frame in video.frames))
        return self.token_ids.nbytes + sum(map(len, encoded)) + sum(one.nbytes for one in pixels if one is not None)

    def without_pixels(self) -> EncodedPrompt:
        return replace(self, pixel_values=None, video_pixel_values=None)

    def followed_by(self, pieces: Iterable[EncodedPrompt]) -> EncodedPrompt:
        """Prompt of a later turn, or a whole trajectory: tokens and images of all pieces, one after another."""
        parts = (self, *pieces)
        pixels = [part.pixel_values for part in parts if part.pixel_values is not None]
        unexpanded = [part.token_ids if part.unexpanded_ids is None else part.unexpanded_ids for part in parts]
        return replace(
            self,
            token_ids=np.concatenate([part.token_ids for part in parts]),
            token_types=np.concatenate([part.token_types for part in parts]),
            image_grids=np.concatenate([part.image_grids for part in parts]),
            image_hashes=tuple(digest for part in parts for digest in part.image_hashes),
            images=tuple(image for part in parts for image in part.images),
            unexpanded_ids=np.concatenate(unexpanded),
            pixel_values=torch.cat(pixels) if pixels else None,
        )


def media_arguments(prompts: Sequence[Prompt], blobs: Mapping[str, bytes]) -> dict[str, Any]:
    """Arguments of a Hugging Face processor for the images and videos of prompts, in their order.

    Frames are given as they are: the processor picks none of them out.
    """
    images = [
        decode_image(blobs[digest], where=f"row {prompt.row_id}")
        for prompt in prompts
        for digest in prompt.image_hashes
    ]
    videos = [
        (video, _frames(video, blobs, f"row {prompt.row_id}, video {number}"))
        for prompt in prompts
        for number, video in enumerate(prompt.videos)
    ]
    arguments: dict[str, Any] = {"images": images} if images else {}
    if videos:
        arguments |= {
            "videos": [frames for _, frames in videos],
            "do_sample_frames": False,
            "video_metadata": [
                {"total_num_frames": len(frames), "fps": video.fps, "frames_indices": list(range(len(frames)))}
                for video, frames in videos
            ],
        }
    return arguments


def _frames(video: Video, blobs: Mapping[str, bytes], where: str) -> np.ndarray:
    """[frames, height, width, 3] uint8"""
    frames = [decode_image(blobs[digest], where=f"{where}, frame {i}") for i, digest in enumerate(video.frame_hashes)]
    sizes = sorted({frame.size for frame in frames})
    if len(sizes) > 1:
        raise UserError(
            f"{where}: its frames have several sizes: {', '.join(f'{w} x {h}' for w, h in sizes[:3])} pixels. "
            "Scale the frames of one video to one size"
        )
    return np.stack([np.asarray(frame) for frame in frames])


def video_hash(frame_hashes: Sequence[str]) -> str:
    """SHA-256 of the frames' content hashes in order: of number, order and content."""
    return hashlib.sha256("".join(frame_hashes).encode()).hexdigest()
