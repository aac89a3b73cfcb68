"""Descriptions of the trackers."""

from __future__ import annotations

from asyncrl.config.sections import Section
from asyncrl.plugins import Part


class WandbConfig(Section):
    """Weights & Biases (`telemetry.trackers: [wandb]`)."""

    project: str = "asyncrl"
    """Project; the run is named after run_dir."""


class TrackioConfig(Section):
    """trackio (`telemetry.trackers: [trackio]`)."""

    project: str = "asyncrl"
    """Project; the run is named after the last folder of run_dir, and a number."""


class MlflowConfig(Section):
    """MLflow (`telemetry.trackers: [mlflow]`)."""

    experiment: str = "asyncrl"
    """Experiment; the run is named after run_dir."""


class SwanLabConfig(Section):
    """SwanLab (`telemetry.trackers: [swanlab]`)."""

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
TRACKIO = Part(
    implementation="asyncrl_plugins.trackers.trackio_runs:TrackioTracker",
    section=TrackioConfig,
    packages=("trackio",),
    extra="trackio",
)
MLFLOW = Part(
    implementation="asyncrl_plugins.trackers.mlflow_runs:MlflowTracker",
    section=MlflowConfig,
    packages=("mlflow",),
    extra="mlflow",
)
SWANLAB = Part(
    implementation="asyncrl_plugins.trackers.swanlab_runs:SwanLabTracker",
    section=SwanLabConfig,
    packages=("swanlab",),
    extra="swanlab",
)
