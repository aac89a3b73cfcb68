"""The interface of a training engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from learner.training.packing import MicroBatch
from protocol.messages import AdapterSpec


@dataclass(frozen=True)
class TokenOutputs:
    """Values at a micro-batch's trainable tokens, fp32 [N]."""

    logprobs: torch.Tensor
    entropies: torch.Tensor
    """Detached unless the engine was asked for their gradient."""


class TrainEngine(Protocol):
    device: torch.device
    adapter: AdapterSpec | None
    """The adapter that is trained and published, known before `prepare`; None: the model itself."""

    def prepare(self) -> None:
        """Load the model and build the optimiser."""
        ...

    def forward(
        self, micro_batch: MicroBatch, *, entropy_gradient: bool = False, as_sampled: bool = False
    ) -> TokenOutputs:
        """Log-probs of the policy; `as_sampled`: of the truncated distribution that an engine samples from."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of a loss that is already divided by global counts."""
        ...

    def optimizer_step(self) -> dict[str, float]:
        """Clip, update, advance the schedule, clear gradients. Returns `grad_norm` (before clipping) and `lr`.

        Raises BadStateError when the gradient is not finite; weights and gradients are then untouched.
        """
        ...

    def clear_gradients(self) -> None: ...

    def not_finite_gradients(self) -> list[str]:
        """Names of the parameters whose accumulated gradient is not finite."""
        ...

    def unwrap_model(self) -> Any:
        """The Hugging Face model itself."""
        ...

    def published_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors that the rollout servers need, tied weights once."""
        ...

    def reference(self) -> AbstractContextManager[None]:
        """Inside, `forward` is that of the initial policy, without gradient: the adapter is switched off.

        Raises UserError where there is no adapter: the initial weights are not kept.
        """
        ...

    def export(self, processor: Any, folder: Path) -> None:
        """Write an ordinary Hugging Face folder, an adapter merged into the weights: no training afterwards."""
        ...

    def save(self, folder: Path) -> None:
        """Optimiser and schedule; the model, or its adapter, is saved beside it."""
        ...

    def load(self, folder: Path) -> None: ...

    def sleep(self) -> int:
        """Take parameters, gradients and optimiser state off the device. Returns the bytes that left it.

        Asleep, everything that needs them raises BadStateError.
        """
        ...

    def wake(self) -> int:
        """Bring them back, bit for bit. Returns the bytes: 0 where it is awake already.

        Raises BadStateError where there is no room for them, or where the model is not what it was.
        """
        ...
