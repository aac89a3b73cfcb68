"""A receiver of weights: they arrive on its device beside its model, while it works; only what is verified is used.

vLLM's worker processes import this, so it imports as little as possible.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from asyncrl.errors import BadStateError
from asyncrl.weight_transfer.cuda_ipc import open_shared
from asyncrl.weight_transfer.flat import BUCKET_BYTES, views, wrong_tensors
from asyncrl.weight_transfer.group import DamagedError, Group, TransferError
from protocol.faults import crash_point
from protocol.messages import CudaMemory, TensorEntry

logger = logging.getLogger(__name__)


@dataclass
class StageOrder:
    """What each receiver is told, in plain values: it may be in another process."""

    version: int
    nonce: str
    host: str
    port: int
    """0: there is `memory` to copy from."""
    size: int
    """Of the group, the learner included."""
    deadline_s: float
    tensors: list[dict[str, Any]]
    """Of `TensorEntry`."""
    memory: dict[str, Any] = field(default_factory=dict)
    """Of `CudaMemory`."""
    offset: int = 0
    """The transfer before this one brought that many bytes of the same version, and was cut off."""


@dataclass(frozen=True)
class Arrival:
    """How far a receiver is."""

    arrived_bytes: int = 0
    is_done: bool = False
    problem: str = ""
    """Why it has given up. What has arrived stays, for a transfer that goes on from there."""
    kind: Literal["", "damaged", "no_room"] = ""
    """Of the problem, where it is no matter of trying again for ever."""


class Stage:
    """One receiver: a flat copy of a version on its device, filled and verified by a thread of its own."""

    def __init__(self, device: torch.device):
        self.arrival = Arrival()
        self._device = device
        self._flat: torch.Tensor | None = None
        self._entries: list[TensorEntry] = []
        self._nonce = ""
        self._thread: threading.Thread | None = None

    def begin(self, order: StageOrder, rank: int) -> None:
        """Forget what there was, unless the order goes on with it; `arrival` tells how it goes."""
        if not order.offset:
            self.drop()
        self.arrival, self._nonce = Arrival(order.offset), order.nonce
        arguments = (order, rank, self._thread)
        self._thread = threading.Thread(target=self._receive, args=arguments, name="weights", daemon=True)
        self._thread.start()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the version that has arrived."""
        if self._flat is None or not self.arrival.is_done:
            raise BadStateError("no verified weights have arrived on this device")
        return views(self._flat, self._entries)

    def drop(self) -> None:
        self._flat, self._entries, self._nonce = None, [], ""

    def _receive(self, order: StageOrder, rank: int, before: threading.Thread | None) -> None:
        try:
            entries = [TensorEntry.model_validate(tensor) for tensor in order.tensors]
            with self._on_device():
                flat = self._room(order, entries, before)
                self._fill(flat, order, rank)
                self._synchronize()
                _check(flat, order, entries)
        except torch.OutOfMemoryError as problem:
            self._give_up(order, str(problem).partition("\n")[0], kind="no_room")
        except DamagedError as problem:
            self._give_up(order, str(problem), kind="damaged")
        except TransferError as problem:
            self._give_up(order, str(problem))
        except Exception as problem:
            logger.exception("version %d did not arrive", order.version)
            self._give_up(order, f"{type(problem).__name__}: {problem}")
        else:
            self._say(order, Arrival(flat.nbytes, is_done=True))

    def _room(self, order: StageOrder, entries: list[TensorEntry], before: threading.Thread | None) -> torch.Tensor:
        """[total_bytes] uint8 to be filled; up to `order.offset` it has been by `before`, which may not have ended."""
        if order.offset:
            if before is not None:
                before.join(order.deadline_s)
            if before is None or before.is_alive() or self._flat is None or self._entries != entries:
                raise TransferError(f"the first {order.offset:,} bytes of version {order.version} are not at hand")
            return self._flat
        flat = torch.empty(entries[-1].offset + entries[-1].nbytes, dtype=torch.uint8, device=self._device)
        if self._nonce == order.nonce:
            self._flat, self._entries = flat, entries
        return flat

    def _fill(self, flat: torch.Tensor, order: StageOrder, rank: int) -> None:
        moved = lambda nbytes: self._moved(order, nbytes)  # noqa: E731
        if order.port:
            where = (order.host, order.port, order.nonce)
            is_over = lambda: self._nonce != order.nonce  # noqa: E731
            with Group.join(*where, rank, order.size, self._device, order.deadline_s, is_over) as group:
                group.broadcast(flat, order.offset, moved)
        else:
            theirs = open_shared(CudaMemory.model_validate(order.memory), self._device)
            for start in range(order.offset, flat.nbytes, BUCKET_BYTES):
                end = min(start + BUCKET_BYTES, flat.nbytes)
                flat[start:end].copy_(theirs[start:end])
                self._synchronize()
                moved(end)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """On a stream of its own: the engine's work neither waits for the copies nor makes them wait."""
        if self._device.type == "cuda":
            with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
                yield
        else:
            yield

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _moved(self, order: StageOrder, nbytes: int) -> None:
        crash_point("weights.receiving")
        self._say(order, Arrival(nbytes))

    def _give_up(self, order: StageOrder, problem: str, kind: Literal["", "damaged", "no_room"] = "") -> None:
        self._say(order, replace(self.arrival, problem=problem, kind=kind))

    def _say(self, order: StageOrder, arrival: Arrival) -> None:
        """Unless another transfer has taken this one's place."""
        if self._nonce == order.nonce:
            self.arrival = arrival


def _check(flat: torch.Tensor, order: StageOrder, entries: Sequence[TensorEntry]) -> None:
    wrong = wrong_tensors(flat, entries)
    if wrong:
        raise DamagedError(
            f"{len(wrong)} of {len(entries)} tensors of version {order.version} have wrong checksums, first "
            f"{wrong[0]!r}"
        )


def device_memory(device: torch.device) -> tuple[str, int] | None:
    """UUID and free bytes of a CUDA device; None for the CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid), torch.cuda.mem_get_info(device)[0]
