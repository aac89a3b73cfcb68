"""Videos: lists of frames that were chosen before. Files of moving pictures are not decoded here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.data.images import check_header, load_image_bytes
from asyncrl.errors import UserError

CONTAINERS = (".mp4", ".mkv", ".mov", ".avi", ".webm", ".m4v", ".mpg", ".mpeg", ".flv", ".wmv", ".ts")
"""Endings of video files."""
FIX = (
    "A row's videos are a list of videos, each a list of frames (paths or bytes of images), such as "
    '[["clip/001.png", "clip/002.png"]]. Take frames out of a file with: ffmpeg -i clip.mp4 -vf fps=2 clip/%03d.png'
)


def load_videos(value: Any, base_dir: Path, row_id: str) -> list[list[bytes]]:
    """Encoded bytes of every frame of a row's videos. Raises UserError naming row, video and frame."""
    if value is None:
        return []
    if not _is_list(value):
        raise UserError(f"row {row_id}: the videos are {_what(value)}. {FIX}")
    return [_frames(video, base_dir, f"row {row_id}, video {number}") for number, video in enumerate(value)]


def _frames(video: Any, base_dir: Path, where: str) -> list[bytes]:
    if not _is_list(video):
        raise UserError(f"{where}: it is {_what(video)}, no list of frames. {FIX}")
    if not len(video):
        raise UserError(f"{where}: it has no frames. Leave the video or the row out")
    frames: list[bytes] = []
    for number, item in enumerate(video):
        place = f"{where}, frame {number}"
        if _is_container(item):
            raise UserError(f"{place}: it is {_what(item)}. {FIX}")
        frame = load_image_bytes(item, base_dir, place)
        check_header(frame, place)
        frames.append(frame)
    return frames


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray)


def _is_container(value: Any) -> bool:
    name = value.get("path") if isinstance(value, dict) else value
    return isinstance(name, str | Path) and str(name).lower().endswith(CONTAINERS)


def _what(value: Any) -> str:
    if _is_container(value):
        return f"a video file ({str(value)[:60]}), which is not decoded here"
    return f"a {type(value).__name__} ({str(value)[:60]})"
