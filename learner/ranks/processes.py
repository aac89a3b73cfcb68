"""The processes of a learner's ranks: joined over a store, started by rank 0 or by torchrun, and watched.

When one dies, all end: torchrun sees to its own; rank 0 watches those that it has started, and ends the learner, which
its launcher starts again from checkpoint and journal.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError, ExitCode, UserError
from asyncrl.launch.processes import die_with_parent
from asyncrl.models.devices import resolve_device
from asyncrl.run_folder.failure import read_failure
from learner.ranks.environment import RankEnvironment
from learner.ranks.group import Ranks
from learner.ranks.orders import Orders

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
STORE_PORT = "ASYNCRL_RANKS_PORT"
"""The port of rank 0's store, in the environment of the ranks that it starts."""
POLL_S = 0.2
GRACE_S = 10.0
"""Time in which rank 0 may end in order after another one's death; then it is ended."""
PARTING_S = 5.0
"""Time of the other ranks to end after their last order."""


@dataclass
class RankProcesses:
    """The other ranks that rank 0 has started; none under torchrun."""

    processes: dict[int, subprocess.Popen[bytes]]
    folder: Path
    """Where they save why they stopped."""
    lost: Exception | None = None
    """Why the run cannot go on, once a rank has ended."""
    _are_leaving: bool = False

    def check(self) -> None:
        """Raise what ended a rank, if one has ended."""
        if self.lost is not None:
            raise self.lost

    def find_lost(self) -> Exception | None:
        """What ended another rank, if one has ended: a collective fails on its connections before it is seen to be
        gone."""
        deadline = time.monotonic() + 5 * POLL_S
        while self.processes and self.lost is None and time.monotonic() < deadline:
            time.sleep(POLL_S / 4)
        return self.lost

    def watch(self) -> None:
        """Look after the ranks until they are to leave. On a thread of its own."""
        while not self._are_leaving:
            for rank, process in self.processes.items():
                if process.poll() is not None and not self._are_leaving:
                    self.lost = self._reason(rank, process.returncode)
                    logger.error("%s", self.lost)
                    self._end_soon()
                    return
            time.sleep(POLL_S)

    def _reason(self, rank: int, code: int) -> Exception:
        failure = read_failure(self.folder, f"{rank}.json")
        if code == ExitCode.USER_ERROR and failure:
            return UserError(f"rank {rank}: {failure.reason}")
        if code == ExitCode.BAD_STATE and failure:
            return BadStateError(f"rank {rank}: {failure.reason}")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return RuntimeError(f"rank {rank} {how}: the learner ends, since its ranks go on together or not at all")

    def _end_soon(self) -> None:
        """End this process, which may wait for the lost rank in a collective, when it has had time to end by itself."""
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and not self._are_leaving:
            time.sleep(POLL_S)
        if not self._are_leaving:
            self.kill()
            logging.shutdown()
            os._exit(ExitCode.CRASHED)

    def leave(self) -> None:
        """Wait for processes that have had their last order."""
        self._are_leaving = True
        deadline = time.monotonic() + PARTING_S
        while any(process.poll() is None for process in self.processes.values()) and time.monotonic() < deadline:
            time.sleep(POLL_S / 4)

    def kill(self) -> None:
        self._are_leaving = True
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()


class Leader:
    """Rank 0's side: it starts the others, joins them, and gives orders."""

    def __init__(self, config: RunConfig, processes: RankProcesses, orders: Orders, store: Store, size: int):
        self.processes = processes
        self.orders = orders
        self._config, self._store, self._size = config, store, size

    def begin(self, **values: object) -> Ranks:
        """Tell the ranks what they are to load, and join them."""
        self.orders.give("begin", **values)
        return join(self._config, self._store, RankEnvironment(0, self._size, 0), self.orders)


@contextmanager
def leading(config: RunConfig, environment: RankEnvironment) -> Iterator[Leader]:
    """Start the other ranks, unless torchrun has; at the end they end, too."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-ranks-") as folder:
        processes = RankProcesses({}, Path(folder))
        if environment.is_given:
            store = given_store(config)
        else:
            store, port = _own_store(config)
            check_local_ranks(config, environment.size)
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
            for rank in range(1, environment.size):
                processes.processes[rank] = _start(rank, environment.size, port, processes.folder)
            threading.Thread(target=processes.watch, name="ranks", daemon=True).start()
        orders = Orders(
            PrefixStore("orders", store),
            leads=True,
            every_s=config.network.heartbeat_s,
            silence_s=config.network.timeout_s,
        )
        try:
            yield Leader(config, processes, orders, store, environment.size)
            orders.give("end")
            processes.leave()
        except (UserError, BadStateError):
            raise
        except Exception as error:
            if lost := processes.find_lost():
                raise lost from error
            raise
        finally:
            orders.close()
            processes.kill()


def _start(rank: int, size: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, STORE_PORT: port}
    return subprocess.Popen(
        [sys.executable, "-m", "learner", *sys.argv[1:], "--failure-file", str(folder / f"{rank}.json")],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches rank 0 alone, which ends the others
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        # It holds nothing, and may wait in a collective that nothing ends.
        preexec_fn=partial(die_with_parent, signal.SIGKILL) if sys.platform == "linux" else None,
    )


def _own_store(config: RunConfig) -> tuple[Store, int]:
    """A store that only this machine reaches, and its port."""
    listening = socket.create_server((LOOPBACK, 0))
    port = listening.getsockname()[1]
    descriptor = listening.detach()
    store = TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor, timeout=_deadline(config)
    )
    return store, port


def given_store(config: RunConfig) -> Store:
    """The store of torchrun, or of the rank 0 that has started this process."""
    if port := os.environ.get(STORE_PORT):
        return TCPStore(LOOPBACK, int(port), is_master=False, wait_for_workers=False, timeout=_deadline(config))
    store, _, _ = next(rendezvous("env://", timeout=_deadline(config)))
    return store


def join(config: RunConfig, store: Store, environment: RankEnvironment, orders: Orders) -> Ranks:
    """Join the process group. Every collective has learner.wait_timeout_s: then it raises on all ranks."""
    device = resolve_device(config.learner.device, "learner.device")
    if device.type == "cuda":
        torch.cuda.set_device(device if environment.size == 1 else environment.local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("group", store),
        rank=environment.rank,
        world_size=environment.size,
        timeout=_deadline(config),
    )
    return Ranks(environment.rank, environment.size, environment.local_rank, orders)


def check_local_ranks(config: RunConfig, count: int) -> None:
    """Raise UserError where this machine has fewer GPUs than ranks."""
    device = resolve_device(config.learner.device, "learner.device")
    if device.type == "cuda" and torch.cuda.device_count() < count:
        raise UserError(
            f"learner.num_processes is {count}, and this process sees {torch.cuda.device_count()} GPU(s): each rank "
            f"needs one of its own. Set learner.num_processes={max(1, torch.cuda.device_count())}, or "
            "learner.device=cpu"
        )


def _deadline(config: RunConfig) -> timedelta:
    return timedelta(seconds=config.learner.wait_timeout_s)
