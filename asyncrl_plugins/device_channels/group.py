"""A process group for one transfer of weights, made by hand: the default group of its processes is not touched.

NCCL between CUDA devices. Gloo between CPUs of one machine, which is how the same code is tested without GPUs.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from asyncrl_plugins.device_channels.flat import BUCKET_BYTES, OwnStreams

c10d: Any = torch.distributed
"""Public names of it that are not declared for type checkers."""
POLL_S = 0.001
_LEARNER = 0
"""Rank of the sender; the receivers follow."""
MOST_HUNG = 3
"""Communicators that this process may leave unmade, each with a thread that hangs: then no more are tried."""
_hung: list[str] = []
"""The errors of those."""


class TransferError(Exception):
    """Transfer failed; the next one may succeed."""


class GroupsHangError(TransferError):
    """Communicators have hung so often here that no more are made: another channel is needed."""


def check_groups_work() -> None:
    """Raises GroupsHangError."""
    if len(_hung) >= MOST_HUNG:
        raise GroupsHangError(f"{len(_hung)} communicators were never made, the last one: {_hung[-1]}")


@dataclass
class Group:
    """Rank 0 sends, all others receive; each waits at most `deadline_s` for any one thing, and `making_s`, if that is
    longer, for the communicator. A process's first one takes long: NCCL loads its kernels and looks at the machine's
    links, for which torch's own groups have 600 s and vLLM's have no limit.

    It exists when all ranks have joined and the communicator is made. Raises TransferError.
    """

    store: Any
    rank: int
    size: int
    device: torch.device
    deadline_s: float
    peers: str
    """Names the others in errors."""
    is_cancelled: Callable[[], bool]
    """Ends every wait once it is true."""
    making_s: float = 0.0

    def __post_init__(self) -> None:
        self._barrier("here", "to join the group")
        with _failing_with(f"no group with {self.peers}"):
            self._backend = self._communicator()

    def _communicator(self) -> Any:
        """Make it in a thread of its own, with a first broadcast of one byte.

        NCCL makes it in the first collective, in a call of C that waits for all ranks, for ever if one has died, and
        no deadline of torch's ends it (its watchdog would end the whole process). What hangs here is left behind.
        """
        check_groups_work()
        made: Future[tuple[Any, Any]] = Future()
        abandoned = threading.Event()
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)

        def make() -> None:
            try:
                with OwnStreams(self.device).one():
                    create = _nccl if self.device.type == "cuda" else _gloo
                    backend = create(self.store, self.rank, self.size, self.deadline_s)
                    made.set_result((backend, backend.broadcast([byte], _from_learner())))
                if abandoned.is_set():
                    backend.abort()
            except BaseException as problem:
                made.set_exception(problem)

        threading.Thread(target=make, name="make-communicator", daemon=True).start()
        limit_s = max(self.deadline_s, self.making_s)
        deadline = time.monotonic() + limit_s
        while not made.done():  # also of a cancelled transfer: what is made must be aborted
            if time.monotonic() > deadline:
                abandoned.set()
                _hung.append(f"waited {limit_s:g} s for a communicator with {self.peers}")
                raise TransferError(_hung[-1])
            time.sleep(POLL_S)
        backend, work = made.result()
        try:
            self._finish(work, "the first byte", deadline)
        except BaseException:
            backend.abort()
            raise
        return backend

    @classmethod
    def host(
        cls,
        listener: socket.socket,
        nonce: str,
        size: int,
        device: torch.device,
        deadline_s: float,
        peers: str,
        is_cancelled: Callable[[], bool] = lambda: False,
        making_s: float = 0.0,
    ) -> Group:
        """The learner's side. `listener` is bound, and belongs to the group from now on."""
        address, port = listener.getsockname()[:2]
        with _failing_with(f"no store at port {port}"):
            store = c10d.TCPStore(
                "127.0.0.1" if address == "0.0.0.0" else address,
                port,
                is_master=True,
                timeout=timedelta(seconds=deadline_s),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        prefixed = c10d.PrefixStore(nonce, store)
        return cls(prefixed, _LEARNER, size, device, deadline_s, peers, is_cancelled, making_s)

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
        is_cancelled: Callable[[], bool] = lambda: False,
        making_s: float = 0.0,
    ) -> Group:
        """A receiver's side."""
        peers = f"the learner at {host} port {port}"
        with _failing_with(f"no connection to {peers}"):
            socket.create_connection((host, port), deadline_s).close()  # the store would try again for long
            deadline = timedelta(seconds=deadline_s)
            store = c10d.TCPStore(host, port, is_master=False, timeout=deadline, wait_for_workers=False)
        return cls(c10d.PrefixStore(nonce, store), rank, size, device, deadline_s, peers, is_cancelled, making_s)

    def broadcast(self, flat: torch.Tensor, moved: Callable[[int], None] = lambda nbytes: None) -> None:
        """Send all bytes from rank 0 into every rank's `flat`, bucket by bucket.

        `moved` is called with the number of bytes that are there.
        """
        for start in range(0, flat.nbytes, BUCKET_BYTES):
            bucket = flat[start : start + BUCKET_BYTES]
            self._one(bucket, start, flat.nbytes)
            moved(start + bucket.nbytes)
        # A sender that leaves early could take with it what is still on its way.
        self._barrier("arrived", "to say that all has arrived")

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._backend.abort()

    def _one(self, bucket: torch.Tensor, start: int, total: int) -> None:
        where = f"bytes {start:,} to {start + bucket.nbytes:,} of {total:,}"
        with _failing_with(f"{self.peers} did not keep up: {where}"):
            self._finish(self._backend.broadcast([bucket], _from_learner()), where)

    def _finish(self, work: Any, what: str, deadline: float = 0.0) -> None:
        deadline = max(deadline, time.monotonic() + self.deadline_s)
        while not work.is_completed():
            self._poll(deadline, f"{self.peers}: {what}")
        # Raises the failure. Without a deadline NCCL would only have the stream wait, and say nothing.
        work.wait(timedelta(seconds=self.deadline_s))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _barrier(self, name: str, purpose: str) -> None:
        """Wait for all ranks: each receiver sets its own key, and the learner one for all when it has seen theirs."""
        with _failing_with(f"{self.peers} has gone"):
            if self.rank != _LEARNER:
                self.store.set(f"{name}/{self.rank}", "1")
                self._wait_for(f"{name}/all", f"{self.peers} {purpose}")
                return
            for rank in range(1, self.size):
                self._wait_for(f"{name}/{rank}", f"receiver {rank} of {self.peers} {purpose}")
            self.store.set(f"{name}/all", "1")

    def _wait_for(self, key: str, what: str) -> None:
        deadline = time.monotonic() + self.deadline_s
        while not self.store.check([key]):
            self._poll(deadline, what)

    def _poll(self, deadline: float, what: str) -> None:
        if self.is_cancelled():
            raise TransferError(f"given up, waiting for {what}")
        if time.monotonic() > deadline:
            raise TransferError(f"waited {self.deadline_s:g} s for {what}")
        time.sleep(POLL_S)


def _from_learner() -> Any:
    options = c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = _LEARNER, 0
    return options


def _gloo(store: Any, rank: int, size: int, deadline_s: float) -> Any:
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=deadline_s)
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return c10d.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, deadline_s: float) -> Any:
    """Group without torch's own deadline, at which its watchdog ends the whole process: `Group` keeps one itself."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # read when a group is made; 3, the default, ends the process
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)
    return c10d.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _failing_with(reason: str) -> Iterator[None]:
    """Convert torch and socket errors to TransferError, with this reason and the first line of the error."""
    try:
        yield
    except (OSError, RuntimeError, c10d.DistError) as problem:
        first_line = str(problem).strip().partition("\n")[0] or type(problem).__name__
        raise TransferError(f"{reason} ({first_line})") from problem
