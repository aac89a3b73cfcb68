"""Hook for additional terms of the loss, such as PAPO's, which take another forward pass of the policy.

A method of the kind `loss_hook` names a class. The learner makes one object of it with the method's settings, and calls
it for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.installed_methods import chosen_hooks
from asyncrl.models.output_head import Comparison, TokenOutputs
from asyncrl.plugins import implementation
from learner.training.batch import Batch
from learner.training.engine import TorchEngine
from learner.training.packing import MicroBatch, TrainGroup
from learner.training.roles import Roles, Scored


@dataclass(frozen=True)
class PolicyPass:
    """Forward pass of the policy over the `n` trained tokens of one micro-batch."""

    actor: TorchEngine
    batch: Batch
    micro_batch: MicroBatch
    number: int
    """Number of the micro-batch in its update, from 1."""
    update_tokens: int
    """Packed tokens of all micro-batches of the update, on all ranks."""
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
    of_update: torch.Tensor | None = None
    """Scalar with gradient that is added as it is, weighed by no token: the term is the sum over the update's
    micro-batches, on all ranks."""


class LossHook(Protocol):
    """Object that a method's class makes with its settings."""

    @property
    def trains_entropy(self) -> bool:
        """Whether the entropies of the policy's pass need a gradient."""
        ...

    def __call__(self, seen: PolicyPass) -> AdditionalLoss | None:
        """Additional terms for a micro-batch; None in all micro-batches of a step, or in none."""
        ...


@runtime_checkable
class WatchingHook(LossHook, Protocol):
    """Hook that takes part in the policy's own pass: reads what the model computes, or compares distributions."""

    def before_pass(self, actor: TorchEngine, batch: Batch, micro_batch: MicroBatch) -> Comparison | None:
        """Watch the pass that comes next; the hook is called after it. `outputs.compared` then has what the comparison
        gives, of which a pass has one."""
        ...


@runtime_checkable
class ScoringHook(LossHook, Protocol):
    """Hook that scores batches in the place of the reference policy, before credit is given."""

    def prepare(self, algorithm: AlgorithmConfig, roles: Roles) -> None:
        """Load models of its own. The engines of the roles are prepared."""
        ...

    def score(self, batch: Batch, scored: Scored, tokens_per_microbatch: int) -> Scored:
        """Return the scores of the other roles with `reference_logprobs`. A collective."""
        ...


def loss_hooks(algorithm: AlgorithmConfig, roles: Roles) -> dict[str, LossHook]:
    """Hooks that the configuration chooses, by the names of their methods, with their models loaded."""
    found = chosen_hooks("loss_hook", algorithm)
    hooks = {name: implementation(method.implementation)(settings) for name, (method, settings) in found.items()}
    for hook in hooks.values():
        if isinstance(hook, ScoringHook):
            hook.prepare(algorithm, roles)
    return hooks
