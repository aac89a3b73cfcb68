"""Images and videos of prompts as a Hugging Face processor takes them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.data.images import decode_image
from asyncrl.errors import UserError
from protocol.messages import Prompt, Video


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
