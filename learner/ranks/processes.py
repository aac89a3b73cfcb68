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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from asyncrl.config.run_sections import NetworkConfig
from asyncrl.config.service_sections import LearnerConfig
from asyncrl.devices.device import resolve_device
from asyncrl.errors import BadStateError, ExitCode, UserError, WaitTimeoutError
from asyncrl.process_end import die_with_parent
from asyncrl.run_folder.failure import read_failure
from learner.ranks.commands import REASONS, CommandChannel, Reasons
from learner.ranks.group import Ranks
from learner.ranks.rank_variables import ADDRESS, STORE_PORT, RankVariables

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
PRESENT = "present"
"""Part of the store in which ranks name their processes."""
POLL_S = 0.2
GRACE_S = 10.0
"""Time in which rank 0 may end in order after another one's death; then it is ended."""
PARTING_S = 5.0
"""Time of the other ranks to end after their last command."""


@dataclass
class RankProcesses:
    """The other ranks."""

    processes: dict[int, subprocess.Popen[bytes]]
    """Processes that rank 0 has started; none under torchrun."""
    folder: Path
    """Folder of the ranks' failure reasons."""
    given: dict[int, psutil.Process] = field(default_factory=dict)
    """Processes on this machine that torchrun has started."""
    reasons: Reasons | None = None
    size: int = 1
    """Ranks, with this one."""
    lost: Exception | None = None
    """Cause of the run's end, once a rank has ended."""
    _are_leaving: bool = False

    def check(self) -> None:
        """Raise what ended a rank, if one has ended."""
        if self.lost is not None:
            raise self.lost

    def find_lost(self) -> Exception | None:
        """Find the cause of another rank's end, if one has ended: a collective fails on its connections before it is
        seen to be gone."""
        deadline = time.monotonic() + 5 * POLL_S
        while self.size > 1 and not self.find_gone() and time.monotonic() < deadline:
            time.sleep(POLL_S / 4)
        return self.lost

    def find_gone(self) -> Exception | None:
        """Find ranks that are gone now, or have reported why they end. torchrun interrupts all where one has died."""
        for rank in range(1, self.size):
            self.lost = self.lost or (self.reasons.of(rank) if self.reasons else None)
        for rank, process in self.given.items():
            if self.lost is None and not _is_running(process):
                self.lost = RuntimeError(
                    f"rank {rank} has gone: the learner ends, since its ranks go on together or not at all. Its own "
                    "lines in the log, or torchrun's report, say why"
                )
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
        if self.reasons and (said := self.reasons.of(rank)):
            return said
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
        """Wait for processes that have had their last command."""
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
    """Rank 0's side: it starts the others, joins them, and gives commands."""

    def __init__(
        self, learner: LearnerConfig, processes: RankProcesses, commands: CommandChannel, store: Store, size: int
    ):
        self.processes = processes
        self.commands = commands
        self._learner, self._store, self._size = learner, store, size

    def begin(self, **values: object) -> Ranks:
        """Tell the ranks what they are to load, and join them."""
        self.commands.give("begin", **values)
        environment = RankVariables(0, self._size, 0)
        ranks = join(self._learner, self._store, environment, self.commands, self._check)
        if not self.processes.processes:
            self.processes.given = _ranks_here(self._store, self._size)
        return ranks

    def _check(self) -> None:
        """Raise what keeps a rank from joining, if it has ended or said so."""
        self.processes.find_gone()
        self.processes.check()

    def reason_of(self, error: Exception) -> Exception:
        """The death of another rank where that was the cause of the error, else the error itself."""
        if isinstance(error, REASONS):
            return error
        if self.processes.given:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, for the same cause: this rank ends already
        return self.processes.find_lost() or error


@contextmanager
def telling_given_ranks(environment: RankVariables, wait_timeout_s: float) -> Iterator[Store | None]:
    """The store of ranks that torchrun has started, who hear there what ends rank 0, also before it leads them. None
    where it is to start them itself."""
    if not environment.is_given:
        yield None
        return
    store = given_store(wait_timeout_s)
    try:
        yield store
    except REASONS as error:
        Reasons(store, environment.rank).say_to_all(error, environment.size)
        raise


@contextmanager
def leading(
    learner: LearnerConfig,
    network: NetworkConfig,
    environment: RankVariables,
    given: Store | None,
    module: str = "learner",
) -> Iterator[Leader]:
    """Start the other ranks as `module`, unless torchrun has, with the store `given`; at the end they end, too.

    What ends this one because of another one's end is raised as that.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-ranks-") as folder:
        processes = RankProcesses({}, Path(folder), size=environment.size)
        if given is not None:
            store = given
        else:
            store, port = _own_store(learner.wait_timeout_s)
            check_local_ranks(learner.device, environment.size)
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
            for rank in range(1, environment.size):
                processes.processes[rank] = _start(module, rank, environment.size, port, processes.folder)
            threading.Thread(target=processes.watch, name="ranks", daemon=True).start()
        commands = CommandChannel(
            PrefixStore("commands", store),
            leads=True,
            every_s=network.heartbeat_s,
            silence_s=network.timeout_s,
        )
        processes.reasons = Reasons(store, environment.rank)
        try:
            yield Leader(learner, processes, commands, store, environment.size)
            commands.give("end")
            processes.leave()
        except REASONS:
            raise
        except KeyboardInterrupt as interruption:
            if gone := processes.find_gone():  # what torchrun interrupts the others for
                raise gone from interruption
            commands.give("end")
            raise
        except Exception as error:
            if lost := processes.find_lost():
                raise lost from error
            raise
        finally:
            commands.close()
            processes.kill()


def _start(module: str, rank: int, size: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, STORE_PORT: port}
    return subprocess.Popen(
        [sys.executable, "-m", module, *sys.argv[1:], "--failure-file", str(folder / f"{rank}.json")],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches rank 0 alone, which ends the others
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        # It holds nothing, and may wait in a collective that nothing ends.
        preexec_fn=partial(die_with_parent, signal.SIGKILL) if sys.platform == "linux" else None,
    )


def _own_store(wait_timeout_s: float) -> tuple[Store, int]:
    """A store that only this machine reaches, and its port."""
    listening = socket.create_server((LOOPBACK, 0))
    port = listening.getsockname()[1]
    descriptor = listening.detach()
    store = TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=descriptor,
        timeout=timedelta(seconds=wait_timeout_s),
    )
    return store, port


def given_store(wait_timeout_s: float) -> Store:
    """The store of torchrun, or of the rank 0 that has started this process. Raises WaitTimeoutError where it does not
    answer within learner.wait_timeout_s."""
    deadline = timedelta(seconds=wait_timeout_s)
    try:
        if port := os.environ.get(STORE_PORT):
            return TCPStore(LOOPBACK, int(port), is_master=False, wait_for_workers=False, timeout=deadline)
        store, _, _ = next(rendezvous("env://", timeout=deadline))
    except DistError as problem:
        address = ":".join(os.environ.get(name, "") for name in ADDRESS)
        raise WaitTimeoutError(
            f"rank 0's store at {address} (MASTER_ADDR, MASTER_PORT) was not reached within "
            f"{deadline.total_seconds():g} s (learner.wait_timeout_s): {_first_line(problem)}"
        ) from problem
    # torchrun keeps its store when it starts the ranks again: what those before have said there is not for these.
    return PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def join(
    learner: LearnerConfig,
    store: Store,
    environment: RankVariables,
    commands: CommandChannel,
    check: Callable[[], None] = lambda: None,
) -> Ranks:
    """Join the process group. Every collective has learner.wait_timeout_s: then it raises on all ranks.

    Raises WaitTimeoutError with the numbers of ranks that have not come within that time, or what `check` raises while
    they are waited for.
    """
    device = resolve_device(learner.device, "learner.device")
    if device.type == "cuda":
        torch.cuda.set_device(device if environment.size == 1 else environment.local_rank)
    _wait_for_all(PrefixStore(PRESENT, store), environment, learner.wait_timeout_s, check)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("group", store),
        rank=environment.rank,
        world_size=environment.size,
        timeout=timedelta(seconds=learner.wait_timeout_s),
    )
    return Ranks(environment.rank, environment.size, environment.local_rank, commands)


def _wait_for_all(present: Store, environment: RankVariables, wait_timeout_s: float, check: Callable[[], None]) -> None:
    keys, began = [str(rank) for rank in range(environment.size)], time.monotonic()
    try:
        present.set(keys[environment.rank], f"{socket.gethostname()} {os.getpid()}")
        while missing := [key for key in keys if not present.check([key])]:
            check()
            if time.monotonic() - began > wait_timeout_s:
                raise WaitTimeoutError(
                    f"rank {', '.join(missing)} of {environment.size} has not come within "
                    f"{wait_timeout_s:g} s (learner.wait_timeout_s): its own log says why"
                )
            time.sleep(POLL_S)
    except DistError as problem:
        raise BadStateError(f"rank 0 has gone: {_first_line(problem)}") from problem


def _ranks_here(store: Store, size: int) -> dict[int, psutil.Process]:
    """The other ranks that run on this machine."""
    found: dict[int, psutil.Process] = {}
    for rank in range(1, size):
        host, _, pid = PrefixStore(PRESENT, store).get(str(rank)).decode().rpartition(" ")
        if host == socket.gethostname() and psutil.pid_exists(int(pid)):
            found[rank] = psutil.Process(int(pid))
    return found


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def leave_after_rank_0(grace_s: float) -> None:
    """Let signals that torchrun sends to all end a rank other than 0 later: rank 0 writes a checkpoint with it first
    (trainer.stop_grace_s), and takes a rank that is gone for what the signal was sent for."""

    def leave(*_: object) -> None:
        late = threading.Timer(grace_s, os._exit, (ExitCode.INTERRUPTED,))
        late.daemon = True
        late.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)


def _first_line(problem: Exception) -> str:
    return str(problem).partition("\n")[0]


def check_local_ranks(learner_device: str, count: int) -> None:
    """Raise UserError where this machine has fewer GPUs than ranks."""
    device = resolve_device(learner_device, "learner.device")
    if device.type == "cuda" and torch.cuda.device_count() < count:
        gpus = torch.cuda.device_count()
        raise UserError(
            f"{count} ranks of the learner are on this machine, which shows {gpus} GPU(s) to them: each rank needs one "
            f"of its own. Set learner.num_processes={max(1, gpus)} (torchrun: --nproc-per-node), or learner.device=cpu"
        )
