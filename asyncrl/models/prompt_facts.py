"""What a prompt must look like when it comes back from a rollout server; cheap to keep for every ticket."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class PromptFacts:
    token_ids: np.ndarray
    """[P] int32, image placeholders expanded."""
    image_grids: np.ndarray
    """[images, 3] int32: temporal, height, width in patches."""
    image_hashes: tuple[str, ...]
    video_grids: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int32))
    """[videos, 3] int32"""
    video_hashes: tuple[str, ...] = ()
