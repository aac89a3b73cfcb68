"""The newest version in the learner's device memory, and the transfers of it that are under way.

Each transfer has its own group and thread: a receiver that dies harms neither the others nor the training loop.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from asyncrl_plugins.device_channels.flat import OwnStreams, pack, release, settle, share
from asyncrl_plugins.device_channels.group import Group, GroupsHangError, TransferError, check_groups_work
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    CudaMemory,
    DeviceSource,
    Error,
    TransferEnd,
    TransferRequest,
    TransferStart,
    WeightManifest,
)
from protocol.weights import Publication

logger = logging.getLogger(__name__)

ENDING_S = 5.0
GIB = 1 << 30


@dataclass
class _Transfer:
    request: TransferRequest
    flat: torch.Tensor
    """The version as it was requested; later publications do not change it."""
    began: float = field(default_factory=time.monotonic)
    memory: CudaMemory | None = None
    over: bool = False
    """Set to end the thread that sends it."""


class DeviceWeights:
    """Copies and transfers of the newest version. The training thread calls `keep`, the network thread the rest.

    Training comes first: without room for a copy nothing is sent any more, and servers are told.
    """

    def __init__(
        self,
        publication: Publication,
        device: torch.device,
        total_bytes: int,
        *,
        host: str,
        deadline_s: float,
        first_s: float = 0.0,
        required: bool = False,
    ):
        """`first_s`: the deadline of a communicator, which may be a server's first. `required`:
        rollout.weights_channel names a channel between devices: versions are kept from the first on."""
        self._publication = publication
        self._device = device
        self._host = host
        self._deadline_s, self._first_s = deadline_s, first_s
        self._guard = threading.Lock()
        self._wanted = required
        """True if each version is kept as it is published; else this begins with the first request."""
        self._given_up = ""
        """The reason for which nothing is sent any more."""
        self._kept: tuple[int, torch.Tensor] | None = None
        self._kept_from_file = False
        self._streams = OwnStreams(device)
        self._transfers: dict[bytes, _Transfer] = {}
        """Transfers by connection, which has one at most."""
        self._threads: list[threading.Thread] = []
        self.source: DeviceSource | None = None
        """Device in the welcome of servers. None for a CPU, where other channels are faster, and without room."""
        if device.type == "cuda":
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self.source = DeviceSource(uuid=uuid, total_bytes=total_bytes)

    def keep(self, manifest: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the published tensors, which the next step changes."""
        with self._guard:
            if not self._wanted:
                return
            self._kept = None  # its memory first
            if self._kept_from_file:  # taken for another stream than the copy's below
                release(self._device)
                self._kept_from_file = False
            try:
                self._kept = (manifest.version, pack(manifest.tensors, tensors, self._device))
            except torch.OutOfMemoryError:
                self._give_up(manifest)

    def answer(self, identity: bytes, request: TransferRequest) -> TransferStart | Error:
        """Start a transfer for this connection, ending its previous one."""
        self._end(identity)
        self._expire()
        try:
            self._publication.check_is_meant(request.publication)
            transfer = _Transfer(request, self._version(request.version))
            port = 0
            if request.channel == "cuda_ipc":
                transfer.memory = _shared(transfer.flat)
            elif request.channel == "nccl":
                port = self._start(transfer)
            else:
                reason = f"this learner sends nothing over {request.channel}"
                raise ProtocolError(ErrorCode.WRONG_CHANNEL, reason)
        except ProtocolError as error:
            return Error(code=error.code, reason=error.reason, version=request.version)
        self._transfers[identity] = transfer
        return TransferStart(version=request.version, nonce=request.nonce, port=port, memory=transfer.memory)

    def end(self, identity: bytes, message: TransferEnd) -> None:
        transfer = self._transfers.get(identity)
        if transfer is not None and transfer.request.nonce == message.nonce:
            transfer.memory = None  # the receiver has closed it itself
            self._end(identity)

    def close(self) -> None:
        for identity in list(self._transfers):
            self._end(identity)
        for thread in self._threads:
            thread.join(ENDING_S)  # the process would crash at its end if one were in torch's code
        with self._guard:
            self._kept = None

    def _version(self, version: int) -> torch.Tensor:
        """[total_bytes] uint8 on the device. Raises ProtocolError VERSION_GONE, or WRONG_CHANNEL: there is no room."""
        with self._guard:
            if self._given_up:
                raise ProtocolError(ErrorCode.WRONG_CHANNEL, self._given_up)
            manifest = self._publication.manifest(version)
            self._wanted = True
            if self._kept is None or self._kept[0] != version:
                # The first version that is requested comes from its file: the model may be a step further.
                try:
                    flat = self._from_file(manifest)
                except torch.OutOfMemoryError as problem:
                    self._give_up(manifest)
                    raise ProtocolError(ErrorCode.WRONG_CHANNEL, self._given_up) from problem
                if self._kept is not None and self._kept[0] > version:
                    return flat
                self._kept, self._kept_from_file = (version, flat), True
            return self._kept[1]

    def _give_up(self, manifest: WeightManifest) -> None:
        """Stop offering device transfers; running ones continue."""
        self._wanted, self._kept, self.source = False, None, None
        size = f"{manifest.total_bytes / GIB:.1f} GiB"
        self._given_up = f"a copy of the weights to send ({size}) finds no room on the learner's device"
        logger.warning("version %d: %s. From now on none is sent from there", manifest.version, self._given_up)

    def _from_file(self, manifest: WeightManifest) -> torch.Tensor:
        data = self._publication.read(manifest.version, 0, manifest.total_bytes)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # and is not written
            with self._streams.one():  # this is the network thread: it waits for no training
                return torch.frombuffer(data, dtype=torch.uint8).to(self._device)

    def _start(self, transfer: _Transfer) -> int:
        """Start to send; returns the port at which the group meets. Raises ProtocolError WRONG_CHANNEL."""
        try:
            check_groups_work()
        except GroupsHangError as problem:
            raise ProtocolError(ErrorCode.WRONG_CHANNEL, f"on the learner's side {problem}") from problem
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listener = socket.create_server((self._host, 0), family=family)
        except OSError as problem:
            reason = f"no port on {self._host} (network.host): {problem}"
            raise ProtocolError(ErrorCode.WRONG_CHANNEL, reason) from problem
        port = listener.getsockname()[1]
        thread = threading.Thread(target=self._send, args=(transfer, listener), name="send-weights", daemon=True)
        thread.start()
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        return port

    def _send(self, transfer: _Transfer, listener: socket.socket) -> None:
        request, peers = transfer.request, f"transfer {transfer.request.nonce}"
        try:
            where, deadline_s = (listener, request.nonce, 1 + request.receivers), self._deadline_s
            with (
                self._streams.one(),  # on the default one it would wait for the training that is queued there
                Group.host(*where, self._device, deadline_s, peers, lambda: transfer.over, self._first_s) as group,
            ):
                group.broadcast(transfer.flat)
        except TransferError as problem:
            level = logging.DEBUG if transfer.over else logging.WARNING
            logger.log(level, "version %d was not sent: %s", request.version, problem)
        except Exception:
            logger.exception("version %d was not sent", request.version)

    def _expire(self) -> None:
        """End transfers of receivers that were killed. One that is only late sees wrong bytes by their checksums."""
        for identity, transfer in list(self._transfers.items()):
            if time.monotonic() - transfer.began > 4 * self._deadline_s + self._first_s:
                logger.warning("transfer %s was never ended", transfer.request.nonce)
                self._end(identity)

    def _end(self, identity: bytes) -> None:
        transfer = self._transfers.pop(identity, None)
        if transfer is None:
            return
        transfer.over = True
        if transfer.memory is not None:
            settle(transfer.memory, self._device)


def _shared(flat: torch.Tensor) -> CudaMemory:
    """Raises ProtocolError where CUDA or torch's allocator, as this process is set up, shares no memory."""
    try:
        return share(flat)
    except RuntimeError as problem:
        reason = f"torch does not share the learner's device memory ({str(problem).partition(chr(10))[0]})"
        raise ProtocolError(ErrorCode.WRONG_CHANNEL, reason) from problem
