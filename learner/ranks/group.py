"""The ranks of a learner: the processes that train one model together, and what they tell each other in a step.

Each has the same batch and decides the same; a rank computes its share of the micro-batches, and columns over the
batch's tokens are put together here. Every method is a collective: all ranks call it, at the same place of their
program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:  # a part of a learner without ranks imports this, too
    from learner.ranks.commands import CommandChannel


@dataclass(frozen=True)
class Ranks:
    """Rank among `size` processes. One process alone needs no process group."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Index on the machine, which chooses the GPU."""
    commands: CommandChannel | None = None
    """Commands of rank 0; None where all ranks do the same anyway."""

    @property
    def leads(self) -> bool:
        """True for the rank that owns sockets, journal and files."""
        return self.rank == 0

    def own(self, device: torch.device) -> torch.device:
        """GPU of this rank, where the ranks are on GPUs."""
        return torch.device(device.type, self.local_rank) if self.size > 1 and device.type != "cpu" else device

    def announce(self, kind: str, payload: Callable[[], bytes] | None = None, **values: Any) -> None:
        """Tell the other ranks to call the same; nothing for a rank that was told."""
        if self.size > 1 and self.leads and self.commands is not None:
            self.commands.give(kind, **values)
            if payload is not None:
                self.broadcast(payload())

    def agree(self, problem: str | None) -> str | None:
        """The first rank's problem, if any rank has one: all raise it, or none does."""
        if self.size == 1:
            return problem
        flag = torch.tensor([self.rank if problem else self.size])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        first = int(flag)
        if first == self.size:
            return None
        return self.broadcast((problem or "").encode(), source=first).decode()

    def total(self, value: float) -> float:
        """Sum of the ranks' numbers."""
        if self.size == 1:
            return value
        summed = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(summed)
        return float(summed)

    def most(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        if self.size == 1:
            return number
        largest = torch.tensor([number])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of every rank, which has as many as the others, in the order of ranks."""
        table = torch.zeros(self.size, len(numbers), dtype=torch.float64)
        table[self.rank] = torch.tensor(numbers, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(table)
        return table.tolist()

    def sum_columns(self, columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """[N] columns of which each rank has filled some places, and left the others 0 -> all places."""
        if self.size == 1 or not columns:
            return dict(columns)
        table = torch.stack([columns[name] for name in sorted(columns)])
        dist.all_reduce(table)
        return dict(zip(sorted(columns), table, strict=True))

    def merge(self, columns: Mapping[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
        """[n] values of this rank's tokens -> those of all ranks, in the order of `place`.

        `columns` has `place` [n] below `length`, of which no two ranks have the same. Values travel as fp32, in which
        whole numbers are exact up to 2^24.
        """
        if self.size == 1 or not columns:
            return dict(columns)
        place = columns["place"]
        kinds = {name: values.dtype for name, values in columns.items() if name != "place"}
        filled = {name: torch.zeros(length).index_put((place,), columns[name].float()) for name in kinds}
        summed = self.sum_columns({"place": torch.zeros(length).index_fill(0, place, 1.0), **filled})
        found = summed.pop("place").nonzero()[:, 0]
        return {"place": found, **{name: summed[name][found].to(kind) for name, kind in kinds.items()}}

    def broadcast(self, data: bytes, source: int = 0) -> bytes:
        """The bytes of rank `source`."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)])
        dist.broadcast(length, source)
        if self.rank == source:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        else:
            buffer = torch.empty(int(length), dtype=torch.uint8)
        if len(buffer):
            dist.broadcast(buffer, source)
        return buffer.numpy().tobytes()


ALONE = Ranks()
"""A learner of one process."""
