"""The reference policy: what the KL terms keep the policy near.

It is a frozen copy of the model it begins with, which may be set to the policy now and then (ProRL, arXiv 2505.24864)
or follow it as a moving average. Of a model with adapters it is the model without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Unpack

import torch
from torch.nn.functional import linear

from asyncrl.config.part_settings import ModelSettings
from asyncrl.config.service_sections import ReferenceConfig
from asyncrl.errors import UserError
from asyncrl.models.output_head import Asked, Comparison, Layer, TokenOutputs
from learner.ranks.group import ALONE, Ranks
from learner.training.engine import TorchEngine
from learner.training.packing import MicroBatch
from learner.training.sharded_files import Write

WEIGHTS_FILE = "weights.pt"
AVERAGES_FILE = "averages.pt"
FOLDER = "reference"
"""Folder in a checkpoint, of a reference that moves."""


class Reference(TorchEngine):
    """A reference policy with weights of its own: it scores, and is never stepped nor published."""

    role = "reference"

    def __init__(self, settings: ModelSettings, reference: ReferenceConfig, ranks: Ranks = ALONE):
        super().__init__(settings, settings.learner.optim, 1, ranks)
        self.config = reference

    def _make_updates(self) -> None:
        """Make no updates. A moving average of 16-bit weights is taken in fp32: its moves are too small for them."""
        trained = [p for p in self.model.parameters() if p.requires_grad] if self.config.moves else []
        self._moving: list[torch.nn.Parameter] = trained
        self.masters = self.sharding.masters(self.model if self.config.ema else torch.nn.Module())
        self.model.requires_grad_(False)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside, its weights are on the device; afterwards in host memory, where the settings ask for that. An error
        inside ends the run: nothing is moved then."""
        if self.config.offload:
            self._sleeper.wake()
        yield
        if self.config.offload:
            self._sleeper.sleep(self._tensors())

    def check_fits(self, actor: TorchEngine, *, compares_distributions: bool) -> None:
        """Raise UserError where it cannot be compared with the policy as the settings say, or cannot become it, or
        where there is no device to take it off."""
        if self.config.offload and self.device.type == "cpu":
            raise UserError(
                f"reference.offload is true, but learner.device {self.settings.learner.device} is the CPU here, whose "
                "memory is the host's. Set reference.offload=false"
            )
        where = f"reference.path is {self.settings.model.path!r}"
        if self.config.moves and self.facts.architecture != actor.facts.architecture:
            raise UserError(
                f"{where}, a model of another size than the policy, and can neither be set to it nor follow it. Leave "
                "reference.reset_every_steps and reference.ema out"
            )
        sizes = [engine.facts.vocabulary for engine in (self, actor)]
        if compares_distributions and sizes[0] != sizes[1]:
            raise UserError(
                f"{where}, with a vocabulary of {sizes[0]}, and the policy's is {sizes[1]}: algorithm.kl_estimator "
                "full sums over both. Set algorithm.kl_estimator=k3"
            )

    @torch.no_grad()
    def exact_kl(self, micro_batch: MicroBatch) -> Comparison:
        """KL of the policy's distributions to the reference's, before the trained tokens.

        Where its weights are gathered while it computes, its output layer is copied: the policy computes with it.
        """
        states = self.states(micro_batch)
        head = self.head.with_layer(self._output_layer()) if self.sharding.gathers else self.head
        return head.kl_after(states)

    def _output_layer(self) -> Layer:
        layer = self.model.get_output_embeddings()
        assert isinstance(layer, torch.nn.Linear), "families whose output layer is another are not known"
        weights = self.sharding.weights_of(layer)
        if self.settings.model.float32_head:
            return lambda hidden: linear(hidden.float(), *(weights[name].float() for name in weights))
        return partial(linear, **weights)

    @torch.no_grad()
    def follow(self, actor: TorchEngine, step: int) -> None:
        """Move as the settings say, after the policy's `step`-th step, from 1; a reset may be the optimiser's, too."""
        every, ema = self.config.reset_every_steps, self.config.ema
        for engine in (self, actor):
            engine.sharding.changed()
        if every and step % every == 0:
            with self.on_device():
                for mine, policys in zip(self._moving, actor.trained, strict=True):
                    self.sharding.local(mine).copy_(actor.sharding.local(policys))
            if self.config.reset_optimizer:
                actor.forget_moments()
        if ema:
            with self.on_device():
                for mine, policys in zip(self.masters.stepped(), actor.updates.stepped(), strict=True):
                    mine.lerp_(policys.to(mine.device), 1 - ema)
                self.masters.round_into_parameters()

    def fall_asleep(self) -> int:
        """Sleep with the policy: nothing to do where the reference is in host memory between its uses."""
        return 0 if self.config.offload else super().fall_asleep()

    def wake_up(self) -> int:
        return 0 if self.config.offload else super().wake_up()

    def files(self, *, copies: bool) -> Write:
        """Weights, and the moving averages that they are the rounded values of."""
        copies = copies or self.config.offload  # it is on the device no more when they are written
        with self.on_device():
            weights = self.sharding.weights_files(WEIGHTS_FILE, copies=copies)
            averages = self.sharding.state_files(self.masters.state_dict(), AVERAGES_FILE, copies=copies)

        def write(folder: Path) -> None:
            weights(folder)
            averages(folder)

        return write

    def load(self, folder: Path) -> None:
        averages = self.sharding.read_state(folder / AVERAGES_FILE)
        with self.on_device():
            self.sharding.load_weights(folder / WEIGHTS_FILE)
            self.masters.load_state_dict(averages, folder)

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from self.masters.copies()


class WithoutAdapters:
    """The reference policy of a model with adapters: the same weights, adapters off. It takes no memory and never
    moves."""

    def __init__(self, actor: TorchEngine):
        self._actor = actor

    def on_device(self) -> AbstractContextManager[None]:
        """True if the reference is where the policy is."""
        return nullcontext()

    def forward(self, micro_batch: MicroBatch, **asked: Unpack[Asked]) -> TokenOutputs:
        """Outputs of the model without its adapters, without gradient."""
        with self._actor.reference():
            return self._actor.forward(micro_batch, **asked)

    def exact_kl(self, micro_batch: MicroBatch) -> Comparison:
        """KL of the policy's distributions to the reference's; adapters never reach the output layer."""
        with self._actor.reference():
            return self._actor.head.kl_after(self._actor.states(micro_batch))
