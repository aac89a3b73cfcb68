"""Settings of the methods. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from asyncrl.config.sections import Section


class PapoConfig(Section):
    """PAPO (arXiv 2507.06448): completions are to become less likely where parts of the images are black."""

    kl_coef: float = Field(default=0.01, gt=0)
    """Weight of KL(policy || policy with masked images) per token, which is made larger (in the paper 0.02, and 0.01
    without a KL to a reference). Costs a second pass and its memory. Tokens of prompts without images have no such
    term. metrics.jsonl has the KL as `kl_prcp`: where it jumps, the loss is gamed."""
    entropy_coeff: float = Field(default=0.03, ge=0)
    """Weight of the entropies of both passes, with whole and with masked images; the loss lowers them. Without it the
    KL grows through the masked pass alone."""
    mask_ratio: float = Field(default=0.6, gt=0, le=1)
    """Probability of each square to be black."""
    patch_pixels: int = Field(default=14, gt=0)
    """Side of a square, in pixels of the image as it is given."""


class NoisyRolloutConfig(Section):
    """Trajectories that see distorted images and are trained on the clean ones (NoisyRollout, arXiv 2504.13055)."""

    share: float = Field(default=0.5, gt=0, lt=1)
    """Share of each group's sampled trajectories that see the distorted images, rounded down."""
    steps: int = Field(default=500, gt=0, le=1000)
    """Steps of forward diffusion, of 1,000, when the run begins."""
    schedule: Literal["sigmoid", "linear"] = "sigmoid"
    """Fall of the steps to 0 over the run."""
    steepness: float = Field(default=30.0, gt=0)
    """Steepness of the sigmoid."""
    midpoint: float = Field(default=2 / 3, ge=0, le=1)
    """Share of the run at which the sigmoid is a half."""

    def number_of(self, sampled: int) -> int:
        """Trajectories of a group that see the distorted images, out of those that are sampled."""
        return int(self.share * sampled)
