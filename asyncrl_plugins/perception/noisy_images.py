"""Noisy images: the distortion that NoisyRollout (arXiv 2504.13055) shows to some trajectories of a group. No torch."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image

from asyncrl.data.images import decode_image
from asyncrl_plugins.perception.settings import NoisyRolloutConfig
from learner.tickets.ticket_hook import TicketContext, TicketRow, TrajectoryChange

DIFFUSION_STEPS = 1000


def annealing(settings: NoisyRolloutConfig, done: float) -> float:
    """Share of the noise that is left when a run is `done`, 0 to 1 (section 3.2).

    `sigmoid`: 1 - 1 / (1 + exp(-steepness (done - midpoint))). `linear`: 1 - done.
    """
    if settings.schedule == "linear":
        return max(0.0, 1.0 - done)
    return 1.0 - 1.0 / (1.0 + math.exp(-settings.steepness * (done - settings.midpoint)))


class NoisyRollout:
    """Hook of tickets: the last sampled trajectories of a group see its images distorted."""

    def __init__(self, settings: NoisyRolloutConfig, context: TicketContext):
        self._settings = settings

    def __call__(self, row: TicketRow) -> dict[int, TrajectoryChange]:
        steps = int(self._settings.steps * annealing(self._settings, row.done))
        if not steps or not row.images:
            return {}
        made = [noisy_image(data, steps, (*row.seed, number), row.where) for number, data in enumerate(row.images)]
        end = row.trajectories
        return dict.fromkeys(range(end - self._settings.number_of(end), end), TrajectoryChange(images=made))


def noisy_image(data: bytes, steps: int, seed: Sequence[int], where: str) -> bytes:
    """Encode an image, as large, behind `steps` of forward diffusion: sqrt(a) x + sqrt(1 - a) e with standard normal e
    and x in [0, 1], clipped to that again. The scale of x is reconstructed from the authors' other settings.

    The same bytes for the same arguments. Raises UserError naming `where` for bytes that are no image.
    """
    pixels = np.asarray(decode_image(data, where), np.float32) / 255
    kept = _kept_signal()[steps - 1]
    noise = np.random.default_rng(seed).standard_normal(pixels.shape, np.float32)
    noisy = np.sqrt(kept) * pixels + np.sqrt(1 - kept) * noise
    buffer = io.BytesIO()
    Image.fromarray(np.rint(noisy.clip(0, 1) * 255).astype(np.uint8)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


@cache
def _kept_signal() -> np.ndarray:
    """[DIFFUSION_STEPS] float32: a_k, the product of 1 - b_j up to k, b_j from 1e-5 to 5e-3 along a sigmoid."""
    rates = (5e-3 - 1e-5) / (1 + np.exp(-np.linspace(-6, 6, DIFFUSION_STEPS))) + 1e-5
    return np.cumprod(1 - rates).astype(np.float32)
