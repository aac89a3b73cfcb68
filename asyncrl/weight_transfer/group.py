"""A process group for one transfer of weights, made by hand: whatever default group its processes have is not touched.

NCCL between CUDA devices. Gloo between CPUs of one machine, which is how the same code is tested without GPUs.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from asyncrl.weight_transfer.flat import BUCKET_BYTES

c10d: Any = torch.distributed
"""What is used of it is public, and not declared."""
POLL_S = 0.001
_LEARNER = 0
"""Rank of the sender; the receivers follow."""


class TransferError(Exception):
    """A transfer that did not succeed. The next one may, and goes on where this one was cut off."""

    def __init__(self, reason: str, arrived_bytes: int = 0):
        """`arrived_bytes`: what every receiver has of the version, from its first byte on."""
        super().__init__(reason)
        self.arrived_bytes = arrived_bytes


class DamagedError(TransferError):
    """Everything has arrived, and checksums are wrong."""


class Group:
    """Rank 0 sends, all others receive; each waits `deadline_s` at most for any one thing."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        device: torch.device,
        deadline_s: float,
        peers: str,
        is_over: Callable[[], bool],
    ):
        """All ranks have come when this returns. `peers` names the others in errors; once `is_over()` whatever waits
        gives up. Raises TransferError."""
        self._store = store
        self._rank = rank
        self._size = size
        self._device = device
        self._deadline_s = deadline_s
        self._peers = peers
        self._is_over = is_over
        self._tell("here")
        self._await("here", "to join the group")
        try:
            make = _nccl if device.type == "cuda" else _gloo
            self._backend = make(store, rank, size, deadline_s)
        except (RuntimeError, c10d.DistError) as problem:
            raise TransferError(f"no group with {peers} ({_first_line(problem)})") from problem

    @classmethod
    def host(
        cls,
        listener: socket.socket,
        nonce: str,
        size: int,
        device: torch.device,
        deadline_s: float,
        peers: str,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Group:
        """The learner's side. `listener` is bound, and is ours from now on."""
        address, port = listener.getsockname()[:2]
        try:
            store = c10d.TCPStore(
                "127.0.0.1" if address == "0.0.0.0" else address,
                port,
                is_master=True,
                timeout=timedelta(seconds=deadline_s),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        except (RuntimeError, c10d.DistError) as problem:
            raise TransferError(f"no store at port {port} ({_first_line(problem)})") from problem
        return cls(c10d.PrefixStore(nonce, store), _LEARNER, size, device, deadline_s, peers, is_over)

    @classmethod
    def join(
        cls,
        host: str,
        port: int,
        nonce: str,
        rank: int,
        size: int,
        device: torch.device,
        deadline_s: float,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Group:
        """A receiver's side."""
        peers = f"the learner at {host} port {port}"
        deadline = timedelta(seconds=deadline_s)
        try:
            socket.create_connection((host, port), deadline_s).close()  # the store would try again for long
            store = c10d.TCPStore(host, port, is_master=False, timeout=deadline, wait_for_workers=False)
        except (OSError, RuntimeError, c10d.DistError) as problem:
            raise TransferError(f"no connection to {peers} ({_first_line(problem)})") from problem
        return cls(c10d.PrefixStore(nonce, store), rank, size, device, deadline_s, peers, is_over)

    def broadcast(self, flat: torch.Tensor, offset: int, moved: Callable[[int], None] = lambda nbytes: None) -> None:
        """Bytes from `offset` on, the same for all, from rank 0 into everybody's `flat`, bucket by bucket; `moved` is
        told how many are there."""
        for start in range(offset, flat.nbytes, BUCKET_BYTES):
            bucket = flat[start : start + BUCKET_BYTES]
            self._one(bucket, start, flat.nbytes)
            moved(start + bucket.nbytes)
        # A sender that leaves early could take with it what is still on its way.
        self._tell("arrived")
        self._await("arrived", "to say that all has arrived")

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._backend.abort()

    def _one(self, bucket: torch.Tensor, start: int, total: int) -> None:
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = _LEARNER, 0
        where = f"bytes {start:,} to {start + bucket.nbytes:,} of {total:,}"
        deadline = time.monotonic() + self._deadline_s
        try:
            work = self._backend.broadcast([bucket], options)
            while not work.is_completed():
                self._look_at_the_clock(deadline, f"{self._peers}: {where}")
            # Raises what went wrong. Without a deadline NCCL would only have the stream wait, and say nothing.
            work.wait(timedelta(seconds=self._deadline_s))
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        except (RuntimeError, c10d.DistError) as problem:
            raise TransferError(f"{self._peers} did not keep up: {where} ({_first_line(problem)})") from problem

    def _tell(self, word: str) -> None:
        """The receivers say it each by itself, the learner when it has heard all of them."""
        if self._rank != _LEARNER:
            self._set(f"{word}/{self._rank}")

    def _await(self, word: str, what: str) -> None:
        everybody = [f"{word}/{rank}" for rank in range(1, self._size)]
        for key in everybody if self._rank == _LEARNER else [f"{word}/all"]:
            who = f"receiver {key.rpartition('/')[2]} of {self._peers}" if self._rank == _LEARNER else self._peers
            deadline = time.monotonic() + self._deadline_s
            try:
                while not self._store.check([key]):
                    self._look_at_the_clock(deadline, f"{who} {what}")
            except (RuntimeError, c10d.DistError) as problem:
                raise TransferError(f"{self._peers} has gone ({_first_line(problem)})") from problem
        if self._rank == _LEARNER:
            self._set(f"{word}/all")

    def _look_at_the_clock(self, deadline: float, what: str) -> None:
        if self._is_over():
            raise TransferError(f"given up, waiting for {what}")
        if time.monotonic() > deadline:
            raise TransferError(f"waited {self._deadline_s:g} s for {what}")
        time.sleep(POLL_S)

    def _set(self, key: str) -> None:
        try:
            self._store.set(key, "1")
        except (RuntimeError, c10d.DistError) as problem:
            raise TransferError(f"{self._peers} has gone ({_first_line(problem)})") from problem


def _gloo(store: Any, rank: int, size: int, deadline_s: float) -> Any:
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=deadline_s)
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return c10d.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, deadline_s: float) -> Any:
    """Not torch's deadline, upon which its watchdog ends the whole process: `Group` looks at the clock itself."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # read when a group is made; 3, the default, ends the process
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)
    return c10d.ProcessGroupNCCL(store, rank, size, options)


def _first_line(problem: BaseException) -> str:
    return str(problem).strip().partition("\n")[0] or type(problem).__name__
