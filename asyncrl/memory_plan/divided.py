"""Bytes of a model over the ranks of a learner: what each keeps, and what is whole on it while a layer is computed.

Exact: parts of weights, gradients and moments. From above: what is gathered in a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl.memory_plan.live_bytes import nbytes
from asyncrl.models.parts import gathered_units

GATHERED_LAYERS = 2
"""Layers whose weights are whole at a time: the one that is computed, and the one that is fetched meanwhile."""


@dataclass(frozen=True)
class Parameter:
    rows: int
    """First dimension, which is divided."""
    width: int
    """Elements of a row."""
    kept: int
    """Bytes of an element in a rank's part: 4 where it is trained, whose part is its master weight."""
    gathered: int
    """Bytes of an element while the layer is computed."""
    is_trained: bool

    @property
    def elements(self) -> int:
        return self.rows * self.width

    def padded(self, ranks: int) -> int:
        """Elements of all parts: each rank has as many rows as rank 0, some of them empty."""
        return -(-self.rows // ranks) * ranks * self.width


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together (asyncrl/models/parts.py)."""

    parameters: tuple[Parameter, ...]

    def part(self, ranks: int) -> int:
        """Bytes of one rank's part of the weights."""
        return sum(p.kept * p.padded(ranks) for p in self.parameters) // ranks

    def trained_part(self, ranks: int) -> int:
        """Bytes of one rank's part of an fp32 tensor for each weight that is trained: a gradient, or one moment."""
        return self.summed(ranks) // ranks

    def whole(self, ranks: int) -> int:
        """Bytes of the gathered weights."""
        return sum(p.gathered * p.padded(ranks) for p in self.parameters)

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of one micro-batch, in the dtype that the unit computes in."""
        return sum(p.gathered * p.elements for p in self.parameters if p.is_trained)

    def summed(self, ranks: int) -> int:
        """Bytes of the same gradients in fp32, as they are summed over the ranks."""
        return sum(4 * p.padded(ranks) for p in self.parameters if p.is_trained)


@dataclass(frozen=True)
class DividedModel:
    units: tuple[Unit, ...]
    """The last is all that belongs to no layer: embeddings, norms, output layer."""
    buffers: int
    """Bytes of what is no parameter, whole on each rank."""

    def part(self, ranks: int) -> int:
        """Bytes of one rank's part of the weights."""
        return sum(unit.part(ranks) for unit in self.units) + self.buffers

    def trained_part(self, ranks: int) -> int:
        """Bytes of one rank's part of the gradients, or of one of AdamW's moments."""
        return sum(unit.trained_part(ranks) for unit in self.units)

    def scored(self, ranks: int) -> int:
        """Bytes that stay gathered after a forward pass without a backward one."""
        return self.units[-1].whole(ranks)

    def working(self, ranks: int, head: int, layers: int, *, cpu_offload: bool) -> int:
        """Most bytes that a forward and backward pass adds on one rank.

        `head` and `layers` are what it adds without gathered weights, up to the gradient of the last hidden states and
        after it. What belongs to no layer stays gathered from forward to backward, and its gradients, which are fp32,
        are summed at the end (torch.distributed.fsdp.fully_shard, reshard_after_forward=None).
        """
        *inner, rest = self.units
        layer = max((unit.whole(ranks) for unit in inner), default=0)
        summing = max((unit.gradients + unit.summed(ranks) for unit in inner), default=0)
        moved = max(unit.part(ranks) for unit in self.units) if cpu_offload else 0
        return moved + max(
            2 * rest.whole(ranks) + layer,  # the first fetch is kept until the next one
            head + rest.whole(ranks) + GATHERED_LAYERS * layer,
            layers + rest.whole(ranks) + GATHERED_LAYERS * layer + summing,
            rest.summed(1) + rest.summed(ranks) + rest.trained_part(ranks),
        )


def divide(model: Any) -> DividedModel:
    """Look at a model whose parameters know whether they are trained."""
    found: list[Unit] = []
    taken: set[int] = set()
    for module, dtype in gathered_units(model):
        own = [parameter for parameter in module.parameters() if id(parameter) not in taken]
        taken |= {id(parameter) for parameter in own}
        parameters: list[Parameter] = []
        for p in own:
            kept = 4 if p.requires_grad else p.element_size()
            rows = p.shape[0] if p.dim() else 1
            gathered = kept if dtype is None else dtype.itemsize
            parameters.append(Parameter(rows, p.numel() // max(rows, 1), kept, gathered, p.requires_grad))
        found.append(Unit(tuple(parameters)))
    return DividedModel(tuple(found), nbytes(model.buffers()))
