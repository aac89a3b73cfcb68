"""Training engines by name. To add one, write a class with the methods of `base.TrainEngine` and name it here."""

from __future__ import annotations

from importlib import import_module

from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import OptimConfig
from learner.training.engines.base import TrainEngine

ENGINES = {"torch": "learner.training.engines.torch_engine:TorchEngine"}


def create_engine(config: RunConfig, optim: OptimConfig, total_updates: int) -> TrainEngine:
    """`total_updates` is the number of optimiser steps that the learning-rate schedule spans."""
    module, _, name = ENGINES[config.learner.engine].partition(":")
    return getattr(import_module(module), name)(config, optim, total_updates)
