"""A receiver of weights, which arrive on its device beside its model while it works; only verified ones are used.

vLLM's worker processes import this, so it imports as little as possible.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch

from asyncrl.errors import BadStateError
from asyncrl_plugins.device_channels.flat import (
    BUCKET_BYTES,
    OwnStreams,
    open_shared,
    release,
    views,
    wrong_tensors,
)
from asyncrl_plugins.device_channels.group import Group, GroupsHangError, TransferError
from protocol.errors import ErrorCode, ProtocolError
from protocol.faults import crash_point
from protocol.messages import CudaMemory, TensorEntry
from rollout_server.engines.arrived_weights import ModelProcess

logger = logging.getLogger(__name__)


@dataclass
class StageOrder:
    """Parameters of a transfer for a receiver, in plain values: it may be in another process."""

    version: int
    nonce: str
    host: str
    port: int
    """0: there is `memory` to copy from."""
    size: int
    """Ranks of the group, the learner included."""
    deadline_s: float
    tensors: list[dict[str, Any]]
    """Fields of each `TensorEntry`."""
    memory: dict[str, Any] = field(default_factory=dict)
    """Fields of `CudaMemory`."""
    first_s: float = 0.0
    """Deadline of the communicator, if that is longer: in an order for a receiver's first transfer."""


@dataclass(frozen=True)
class Arrival:
    """Progress of a receiver."""

    arrived_bytes: int = 0
    is_done: bool = False
    problem: str = ""
    """The reason for which it has given up; empty if it has not."""
    code: str = ""
    """The `ErrorCode` of a problem that another attempt would meet again."""


class Stage:
    """One receiver: a flat copy of a version on its device, filled and verified by a thread of its own."""

    def __init__(self, device: torch.device):
        self.arrival = Arrival()
        self.device = device
        self._streams = OwnStreams(device)
        self._flat: torch.Tensor | None = None
        self._entries: list[TensorEntry] = []
        self._nonce = ""

    def begin(self, order: StageOrder, rank: int) -> None:
        """Drop what has arrived, and start to receive. `arrival` shows the progress."""
        self.drop()
        self.arrival, self._nonce = Arrival(), order.nonce
        threading.Thread(target=self._receive, args=(order, rank), name="weights", daemon=True).start()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the version that has arrived."""
        if self._flat is None or not self.arrival.is_done:
            raise BadStateError("no verified weights have arrived on this device")
        return views(self._flat, self._entries)

    def drop(self) -> None:
        """Free what has arrived: the next version is as large, and the model may need the room meanwhile."""
        is_there = self._flat is not None
        self._flat, self._entries, self._nonce = None, [], ""
        if is_there:
            release(self.device)

    def _receive(self, order: StageOrder, rank: int) -> None:
        def report(arrival: Arrival) -> None:
            """Report progress unless this transfer was dropped or a newer one has started."""
            if self._nonce == order.nonce:
                self.arrival = arrival

        def moved(nbytes: int) -> None:
            crash_point("weights.receiving")
            report(Arrival(nbytes))

        try:
            entries = [TensorEntry.model_validate(tensor) for tensor in order.tensors]
            with self._streams.one():
                flat = torch.empty(entries[-1].offset + entries[-1].nbytes, dtype=torch.uint8, device=self.device)
                if self._nonce == order.nonce:
                    self._flat, self._entries = flat, entries
                self._fill(flat, order, rank, moved)
                self._synchronize()
                if wrong := wrong_tensors(flat, entries):
                    raise ProtocolError(
                        ErrorCode.MALFORMED,
                        f"{len(wrong)} of {len(entries)} tensors have wrong checksums, first {wrong[0]!r}: the link or "
                        "a memory corrupts data",
                    )
        except torch.OutOfMemoryError as problem:
            reason = f"it finds no room beside the engine's model: {str(problem).partition(chr(10))[0]}"
            report(replace(self.arrival, problem=reason, code=ErrorCode.WRONG_CHANNEL))
        except ProtocolError as problem:
            report(replace(self.arrival, problem=problem.reason, code=problem.code))
        except GroupsHangError as problem:
            report(replace(self.arrival, problem=str(problem), code=ErrorCode.WRONG_CHANNEL))
        except TransferError as problem:
            report(replace(self.arrival, problem=str(problem)))
        except Exception as problem:
            logger.exception("version %d did not arrive", order.version)
            report(replace(self.arrival, problem=f"{type(problem).__name__}: {problem}"))
        else:
            report(Arrival(flat.nbytes, is_done=True))

    def _fill(self, flat: torch.Tensor, order: StageOrder, rank: int, moved: Callable[[int], None]) -> None:
        if order.port:

            def is_cancelled() -> bool:
                return self._nonce != order.nonce

            where = (order.host, order.port, order.nonce)
            deadlines = (order.deadline_s, is_cancelled, order.first_s)
            with Group.join(*where, rank, order.size, self.device, *deadlines) as group:
                group.broadcast(flat, moved)
            return
        shared = open_shared(CudaMemory.model_validate(order.memory), self.device)
        for start in range(0, flat.nbytes, BUCKET_BYTES):
            end = min(start + BUCKET_BYTES, flat.nbytes)
            flat[start:end].copy_(shared[start:end])
            self._synchronize()
            moved(end)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


# --- functions that run in each process of the model ----------------------------------------------


def begin(process: ModelProcess, order: dict[str, Any]) -> None:
    """Start to receive, and return at once; `arrival` reports the progress."""
    _stage_of(process).begin(StageOrder(**order), rank=1 + process.rank)


def arrival(process: ModelProcess) -> list[Any]:
    """Fields of the `Arrival`."""
    return list(astuple(_stage_of(process).arrival))


def drop(process: ModelProcess) -> None:
    _stage_of(process).drop()


def tensors(process: ModelProcess) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the version that has arrived."""
    return _stage_of(process).tensors()


def memory(process: ModelProcess) -> list[Any]:
    """UUID and free bytes of a CUDA device; empty for the CPU."""
    device = process.device
    if device.type != "cuda":
        return []
    return [str(torch.cuda.get_device_properties(device).uuid), torch.cuda.mem_get_info(device)[0]]


def _stage_of(process: ModelProcess) -> Stage:
    return process.state.setdefault("device_channels", Stage(process.device))
