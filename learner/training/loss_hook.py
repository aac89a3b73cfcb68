"""Hook for additional terms of the loss, such as PAPO's, which take another forward pass of the policy.

A method of the kind `loss_hook` names a class. The learner makes one object of it with the method's settings, and calls
it for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.installed_methods import chosen_hooks
from asyncrl.models.output_head import TokenOutputs
from asyncrl.plugins import implementation
from learner.training.batch import Batch
from learner.training.engine import TorchEngine
from learner.training.packing import TrainGroup


@dataclass(frozen=True)
class PolicyPass:
    """Forward pass of the policy over the `n` trained tokens of one micro-batch."""

    actor: TorchEngine
    batch: Batch
    groups: Sequence[TrainGroup]
    """Packed groups of the micro-batch."""
    row: torch.Tensor
    """[n] int64 row in the batch of each token, on the CPU."""
    outputs: TokenOutputs
    """Log-probs with gradient, and entropies, which have one where `trains_entropy` asks for it."""

    def again(self, groups: Sequence[TrainGroup], *, trains_entropy: bool) -> TokenOutputs:
        """Outputs of the policy for the same tokens after other prompts. The memory of this pass is there at the same
        time. All ranks must call it equally often."""
        return self.actor.forward(self.actor.pack(groups), entropy="gradient" if trains_entropy else "none")


@dataclass(frozen=True)
class AdditionalLoss:
    """Terms that a hook adds to the token losses of a micro-batch."""

    token_loss: torch.Tensor
    """[n], with gradient. Inserted tokens do not get it, and neither do tokens that the correction masks."""
    columns: Mapping[str, torch.Tensor]
    """[n] each, detached: their means over the step's tokens are metrics of these names. All micro-batches of a step
    have the same ones."""


class LossHook(Protocol):
    """Object that a method's class makes with its settings."""

    @property
    def trains_entropy(self) -> bool:
        """Whether the entropies of the policy's pass need a gradient."""
        ...

    def __call__(self, seen: PolicyPass) -> AdditionalLoss | None:
        """Additional terms for a micro-batch; None in all micro-batches of a step, or in none."""
        ...


def loss_hooks(algorithm: AlgorithmConfig) -> dict[str, LossHook]:
    """Hooks that the configuration chooses, by the names of their methods."""
    found = chosen_hooks("loss_hook", algorithm)
    return {name: implementation(method.implementation)(settings) for name, (method, settings) in found.items()}
