"""The interface of training engines, and facts about their models.

With several ranks each has an engine. `forward`, `backward`, `optimizer_step`, `published_state`, `model_files`,
`files`, `load` and `export` are collectives: all ranks call them, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from asyncrl.models.output_head import Entropy, OtherStates, TokenOutputs
from asyncrl.models.published import fingerprint_of, published_tensors
from asyncrl.models.vision_features import frozen_vision
from learner.training.model_flops import ModelFlops
from learner.training.packing import MicroBatch, TrainGroup
from protocol.messages import AdapterSpec

Write = Callable[[Path], None]
"""Writes files into a folder, later and on any thread; of several ranks all call it, and write their parts. What it
writes was copied if training goes on meanwhile (`copies`), else it is what the engine has by then."""


@dataclass(frozen=True)
class EngineFacts:
    """Facts about an engine's model for code that does not touch its weights."""

    vocabulary: int
    """Rows of the output layer."""
    architecture: str
    """Fingerprint of published names, dtypes and shapes."""
    published_bytes: int
    dtype: torch.dtype
    """Dtype of computation and of publication."""
    source: str
    """Folder that the model was loaded from."""
    flops: ModelFlops
    frozen_vision: str
    """Fingerprint of vision tower and connector where neither is trained, else empty."""


def describe_model(model: Any, adapter: AdapterSpec | None) -> EngineFacts:
    """Facts about a loaded model, whole and in its own dtype."""
    tensors = list(published_tensors(model))
    shapes = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors]
    return EngineFacts(
        vocabulary=model.get_output_embeddings().weight.shape[0],
        architecture=fingerprint_of(shapes, adapter),
        published_bytes=sum(tensor.nbytes for _, tensor in tensors),
        dtype=model.dtype,
        source=model.name_or_path,
        flops=ModelFlops(model),
        frozen_vision=frozen_vision(model),
    )


class TrainEngine(Protocol):
    """A model that is trained. The step, checkpoints and publication know no more of it than this."""

    facts: EngineFacts
    device: torch.device
    """Device of micro-batches and their outputs."""
    adapter: AdapterSpec | None
    """The adapter that is trained and published; None: the model itself."""

    def prepare(self) -> None: ...

    def pack(self, groups: Sequence[TrainGroup]) -> MicroBatch:
        """One micro-batch of these groups, on the device."""
        ...

    def forward(
        self,
        micro_batch: MicroBatch,
        *,
        entropy: Entropy = "none",
        squared_probabilities: bool = False,
        other: OtherStates | None = None,
        as_sampled: bool = False,
    ) -> TokenOutputs: ...

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of a loss that is already divided by counts over all ranks: ranks are summed."""
        ...

    def optimizer_step(self) -> dict[str, float]:
        """Raises BadStateError, on all ranks, when the gradient is not finite."""
        ...

    def published_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors, one at a time; all ranks take them all."""
        ...

    def load_published(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None: ...

    def model_files(self, processor: Any, *, copies: bool) -> Write:
        """The model as it is now, as a Hugging Face folder."""
        ...

    def files(self, *, copies: bool) -> Write:
        """Files for a restart: master weights, optimiser and schedule."""
        ...

    def load(self, folder: Path) -> None: ...

    def export(self, processor: Any, folder: Path) -> None: ...

    def sleep(self) -> int: ...

    def wake(self) -> int: ...
