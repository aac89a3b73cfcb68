"""Descriptions of the trackers."""

from __future__ import annotations

from asyncrl.config.sections import Section
from asyncrl.plugins import Part


class WandbConfig(Section):
    """Weights & Biases (`telemetry.trackers: [wandb]`)."""

    project: str = "asyncrl"
    """Project; the run is named after run_dir."""


TENSORBOARD = Part(
    implementation="asyncrl_plugins.trackers.tensorboard_events:TensorBoardTracker",
    packages=("tensorboard",),
    extra="tensorboard",
)
WANDB = Part(
    implementation="asyncrl_plugins.trackers.weights_and_biases:WandbTracker",
    section=WandbConfig,
    packages=("wandb",),
    extra="wandb",
)
