"""Channels from device memory to device memory, over Gloo where they use NCCL: the same code but for the backend."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from asyncrl.errors import BadStateError, UserError
from asyncrl_plugins.device_channels import flat
from asyncrl_plugins.device_channels import group as group_module
from asyncrl_plugins.device_channels import receiver as device_transfer
from asyncrl_plugins.device_channels.flat import OwnStreams
from asyncrl_plugins.device_channels.group import Group, TransferError
from asyncrl_plugins.device_channels.stage import Arrival, Stage, StageOrder
from asyncrl_plugins.device_channels.staging import Staging
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import DeviceSource, Error, TransferRequest, TransferStart, WeightManifest
from rollout_server.engines.arrived_weights import ThisProcess
from rollout_server.weights.channels import GIB, DeviceMemory, choose_channel
from tests.plugins.device_channels.device_channel_rig import (
    CPU,
    DirectSocket,
    LearnerHalf,
    Weights,
    order_of,
    some_weights,
)
from tests.rigs.waiting import wait_until


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[LearnerHalf]:
    half = LearnerHalf(tmp_path)
    yield half
    half.close()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_transfer, "RETRY_S", 0.0)


def fetch(
    learner: LearnerHalf,
    manifest: WeightManifest,
    staging: Staging,
    channel: Any = "nccl",
    timeout_s: float = 60.0,
) -> list[tuple[str, torch.Tensor]]:
    socket: Any = DirectSocket(learner)

    async def run() -> list[tuple[str, torch.Tensor]]:
        await device_transfer.receive(socket, manifest, channel, staging, host="127.0.0.1", timeout_s=timeout_s)
        return list(staging.weights(manifest))

    try:
        return asyncio.run(run())
    finally:
        assert socket.ended == socket.begun


def ask(
    learner: LearnerHalf, version: int, identity: bytes = b"a", *, nonce: str = "", channel: Any = "nccl", **more: Any
) -> TransferStart | Error:
    """The learner's answer to a request for a version."""
    request = TransferRequest(
        version=version,
        publication=learner.publication.id,
        nonce=nonce or f"v{version}",
        channel=channel,
        **{"receivers": 1, **more},
    )
    return learner.device_weights.answer(identity, request)


def assert_equal(got: Sequence[tuple[str, torch.Tensor]], wanted: Weights) -> None:
    assert [name for name, _ in got] == list(wanted)
    for name, tensor in got:
        assert tensor.dtype == wanted[name].dtype  # never upcast
        assert torch.equal(tensor, wanted[name]), name


# --- a transfer -----------------------------------------------------------------------------------------


def test_every_bit_arrives_in_its_own_dtype_whatever_the_learner_trains_meanwhile(
    learner: LearnerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat, "BUCKET_BYTES", 100)  # of the checks
    monkeypatch.setattr("asyncrl_plugins.device_channels.group.BUCKET_BYTES", 100)
    staging = Staging(ThisProcess(CPU))
    first, second = some_weights(1), some_weights(2)
    assert_equal(fetch(learner, learner.publish(1, first), staging), first)  # from the published file: nobody had asked
    kept = {name: tensor.clone() for name, tensor in second.items()}
    manifest = learner.publish(2, second)
    for tensor in second.values():
        tensor.zero_()
    assert_equal(fetch(learner, manifest, staging), kept)


def test_a_wrong_byte_is_found_and_nothing_is_loaded(learner: LearnerHalf) -> None:
    staging = Staging(ThisProcess(CPU))
    fetch(learner, learner.publish(1, some_weights(1)), staging)  # from now on versions are kept
    manifest = learner.publish(2, some_weights(2))
    kept = learner.device_weights._kept
    assert kept is not None
    kept[1][manifest.tensors[3].offset] ^= 1
    with pytest.raises(ProtocolError, match=r"version 2, receiver 0: 1 of 4 tensors have wrong .*'counts'") as caught:
        fetch(learner, manifest, staging)
    assert caught.value.code is ErrorCode.MALFORMED
    with pytest.raises(BadStateError, match="no verified weights have arrived"):
        list(staging.weights(manifest))


def test_a_version_that_has_gone_is_said_to_have_gone(learner: LearnerHalf) -> None:
    manifests = [learner.publish(version, some_weights(version)) for version in (1, 2, 3)]
    others = manifests[2].model_copy(update={"publication": "another"})  # equal in number, and maybe not in bits
    for gone, told in ((manifests[0], "version 1 is not published any more"), (others, "another has ended")):
        with pytest.raises(ProtocolError, match=told) as caught:
            fetch(learner, gone, Staging(ThisProcess(CPU)))
        assert caught.value.code is ErrorCode.VERSION_GONE
    assert_equal(
        fetch(learner, manifests[1], Staging(ThisProcess(CPU))), some_weights(2)
    )  # the one before the newest is there
    assert_equal(fetch(learner, manifests[2], Staging(ThisProcess(CPU))), some_weights(3))


def test_several_workers_of_one_engine_take_the_same_broadcast(learner: LearnerHalf) -> None:
    weights = some_weights(5)
    manifest = learner.publish(1, weights)
    start = ask(learner, 1, nonce="two", receivers=2)
    assert isinstance(start, TransferStart)
    order = StageOrder(**{**order_of(manifest, start.port, "two"), "size": 3})
    stages = [Stage(CPU), Stage(CPU)]
    for rank, each in enumerate(stages, start=1):
        each.begin(order, rank)
    wait_until(lambda: all(each.arrival.is_done for each in stages), "both arrivals")
    for each in stages:
        assert_equal(list(each.tensors()), weights)


# --- transfers that are cut off -------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1], ids=["the learner", "the receiver"])
def test_a_transfer_that_is_cut_off_is_a_failure_and_the_next_one_brings_everything(
    learner: LearnerHalf, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    for module in ("group", "stage", "flat"):
        monkeypatch.setattr(f"asyncrl_plugins.device_channels.{module}.BUCKET_BYTES", 1 << 16)
    send = Group._one

    def cut(group: Group, bucket: torch.Tensor, start: int, total: int) -> None:
        if group.rank == rank and start == 2 << 16:
            raise TransferError("the cable was pulled")
        send(group, bucket, start, total)

    weights, staging = some_weights(1, megabytes=1), Staging(ThisProcess(CPU))
    manifest = learner.publish(1, weights)
    with monkeypatch.context() as patch:
        patch.setattr(Group, "_one", cut)
        told = r"bytes 131,072 to 196,608 of 1,048" if rank == 0 else "the cable was pulled"
        with pytest.raises(TimeoutError, match=rf"nccl: version 1, receiver 0: .*{told}"):
            fetch(learner, manifest, staging, timeout_s=2.0)
    assert_equal(fetch(learner, manifest, staging), weights)


# --- peers that die or stand still ----------------------------------------------------------------------


def test_a_receiver_that_never_comes_is_waited_for_until_the_deadline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = LearnerHalf(tmp_path, deadline_s=0.2)
    learner.publish(1, some_weights(1))
    assert isinstance(ask(learner, 1, nonce="nobody", receivers=2), TransferStart)
    told = "waited 0.2 s for receiver 1 of transfer nobody to join the group"
    wait_until(lambda: told in caplog.text, told)
    learner.close()


@pytest.mark.parametrize(
    ("arrivals", "told"),
    [
        (
            [Arrival(40), Arrival(100, is_done=True)],
            r"waited 0.15 s for version 3: the receivers have 40 and 100 bytes",
        ),
        ([Arrival(100, is_done=True), Arrival(problem="it died")], "version 3, receiver 1: it died"),
    ],
)
def test_a_receiver_that_stands_still_or_fails_is_given_up(arrivals: list[Arrival], told: str) -> None:
    class Receivers(Staging):
        async def _begin(self, order: StageOrder) -> None:
            pass

        async def _call(self, what: str) -> list[Sequence[Any]]:
            return [astuple(arrival) for arrival in arrivals]

    order = StageOrder(version=3, nonce="n", host="h", port=1, size=3, deadline_s=0.05, tensors=[])
    with pytest.raises(TransferError, match=told):
        asyncio.run(Receivers(ThisProcess(CPU)).receive(order))


def test_making_a_communicator_may_have_more_time_than_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL loads its kernels for a process's first one."""
    done: Any = SimpleNamespace(is_completed=lambda: True, wait=lambda timeout: None)
    backend: Any = SimpleNamespace(broadcast=lambda tensors, options: done, abort=lambda: None)

    def slow(*_: object) -> Any:
        time.sleep(0.3)
        return backend

    monkeypatch.setattr(group_module, "_gloo", slow)
    monkeypatch.setattr(group_module, "_hung", [])
    alone: Any = (torch.distributed.HashStore(), 0, 1, CPU, 0.05, "nobody", lambda: False)
    assert Group(*alone, making_s=60.0)._backend is backend
    with pytest.raises(TransferError, match=r"waited 0.05 s for a communicator with nobody"):
        Group(*alone)


def test_a_receiver_s_first_communicator_has_the_time_of_a_first_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def join(*arguments: Any) -> Any:
        given.append(arguments[-1])
        raise TransferError("no learner")

    monkeypatch.setattr(Group, "join", join)
    staging = Staging(ThisProcess(CPU))
    tensor = {"name": "w", "dtype": "float32", "shape": (1,), "offset": 0, "nbytes": 4, "xxh3": 0}
    order = StageOrder(1, "n", "h", 1, 2, deadline_s=5.0, tensors=[tensor], first_s=60.0)
    for _ in range(2):
        with pytest.raises(TransferError, match="no learner"):
            asyncio.run(staging.receive(order))
    assert given == [60.0, 0.0]


@pytest.mark.parametrize("side", ["learner", "receiver"])
def test_a_communicator_that_is_never_made_is_given_up_and_after_three_the_channel(
    learner: LearnerHalf, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """As NCCL's call that waits for a rank that has died: nothing ends it, and it must hold no version meanwhile."""
    make, released, hung = group_module._gloo, threading.Event(), list[str]()
    monkeypatch.setattr(group_module, "_hung", hung)

    def hangs(store: Any, rank: int, size: int, deadline_s: float) -> Any:
        if (rank == 0) == (side == "learner"):
            released.wait(30)
        return make(store, rank, size, 0.1)

    monkeypatch.setattr(group_module, "_gloo", hangs)
    learner.device_weights._deadline_s = 1.0
    manifest, staging = learner.publish(1, some_weights(1)), Staging(ThisProcess(CPU))
    began = time.monotonic()
    for _ in range(3):
        with pytest.raises(TimeoutError, match="nccl: version 1"):
            fetch(learner, manifest, staging, timeout_s=1.0)
        asyncio.run(staging.drop())
    wait_until(lambda: len(hung) >= 3, "all three have been noticed")
    assert time.monotonic() - began < 15
    assert re.fullmatch(r"waited 1 s for a communicator with (the learner at .*|transfer \w+)", hung[0])
    with pytest.raises(ProtocolError, match=r"3 communicators were never made, the last one: waited 1 s") as caught:
        fetch(learner, manifest, staging, timeout_s=1.0)
    assert caught.value.code is ErrorCode.WRONG_CHANNEL, "so that a server may choose another, or says why it ends"
    released.set()


def test_versions_are_sent_beside_the_training_that_is_queued(
    learner: LearnerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that is a stream of its own; here it is seen that each side asks for one around the whole transfer."""
    streams: list[str] = []

    @contextmanager
    def one(self: OwnStreams) -> Iterator[None]:
        streams.append(threading.current_thread().name)
        yield

    monkeypatch.setattr(OwnStreams, "one", one)
    fetch(learner, learner.publish(1, some_weights(1)), Staging(ThisProcess(CPU)))
    assert {"weights", "send-weights"} <= set(streams)


# --- one GPU's memory -----------------------------------------------------------------------------------


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """torch's handles of CUDA memory, for storages on the CPU."""
    shared: dict[str, Any] = {"settled": []}

    def share(storage: Any) -> tuple[Any, ...]:
        shared["storage"] = storage
        return (3, b"\x01handle", storage.nbytes(), 512, b"/torch_7", 4, b"event", True)

    def open_it(device: int, *handles: Any) -> Any:
        nbytes = shared["storage"].nbytes()
        assert (device, *handles) == (0, b"\x01handle", nbytes, 512, b"/torch_7", 4, b"event", True)
        return shared["storage"]

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share, raising=False)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_it, raising=False)
    monkeypatch.setattr(
        torch.UntypedStorage,
        "_release_ipc_counter",
        lambda counter, offset, device: shared["settled"].append((counter, offset)),
    )
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return shared


def test_shared_memory_is_copied_verified_and_let_go_even_of_a_receiver_that_was_killed(
    tmp_path: Path, shared_memory: dict[str, Any]
) -> None:
    learner = LearnerHalf(tmp_path, deadline_s=0.01)
    weights = some_weights(1)
    manifest = learner.publish(1, weights)
    learner.device_weights._kept = (1, flat.pack(manifest.tensors, weights.items(), CPU))
    got = fetch(learner, manifest, Staging(ThisProcess(CPU)), channel="cuda_ipc")
    shared_memory["storage"].fill_(0)
    assert_equal(got, weights)
    assert not shared_memory["settled"], "the receiver has closed it itself"
    assert isinstance(ask(learner, 1, channel="cuda_ipc"), TransferStart)
    time.sleep(0.05)  # more than four deadlines, and nobody says that it is over
    ask(learner, 9, b"b", channel="cuda_ipc")
    assert shared_memory["settled"] == [(b"/torch_7", 4)]
    learner.close()


# --- which channel --------------------------------------------------------------------------------------


LEARNERS = DeviceSource(uuid="gpu-0", total_bytes=4 * GIB)
ROOM = 6 * GIB


def on(*uuids: str, free: int = ROOM) -> list[DeviceMemory]:
    return [DeviceMemory(uuid, free) for uuid in uuids]


def choose(configured: str = "auto", **changes: Any) -> str:
    facts = {"same_host": True, "source": LEARNERS, "devices": on("gpu-1"), "open_network": True}
    return choose_channel(configured, **{**facts, **changes})


@pytest.mark.parametrize(
    ("facts", "chosen"),
    [
        ({"devices": on("gpu-0")}, "cuda_ipc"),
        ({"devices": on("gpu-1")}, "nccl"),
        ({"devices": on("gpu-1", "gpu-2")}, "nccl"),
        ({"devices": on("gpu-1"), "same_host": False}, "nccl"),
        ({"devices": on("gpu-0", "gpu-1")}, "shm"),  # NCCL refuses two processes on gpu-0
        ({"devices": on("gpu-0", free=3 * GIB)}, "shm"),
        ({"devices": on("gpu-1", free=4 * GIB)}, "shm"),  # NCCL needs some, too
        ({"devices": on("gpu-1"), "open_network": False, "same_host": False}, "zmq"),
        ({"devices": ()}, "shm"),
        ({"source": None}, "shm"),
        ({"source": None, "same_host": False}, "zmq"),
    ],
)
def test_auto_takes_the_best_that_both_sides_have(facts: dict[str, Any], chosen: str) -> None:
    assert choose(**facts) == chosen
    assert choose(chosen, **facts) == chosen, "and so it is if it is asked for"


def test_what_takes_auto_off_the_gpus_is_a_warning_with_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    choose(devices=on("gpu-1"))
    choose(devices=())
    choose(source=None)
    assert not caplog.records, "there is nothing to fix"
    assert choose(devices=on("gpu-1", free=3 * GIB)) == "shm"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    told = record.getMessage()
    assert "over shm, not from GPU to GPU: every version (4.0 GiB) is copied to the learner's host memory" in told
    assert "cuda_ipc: the engine is on gpu-1" in told
    assert "nccl: new weights arrive beside the engine's model, which needs 4.5 GiB, and gpu-1 has 3.0 free" in told


@pytest.mark.parametrize(
    ("configured", "facts", "told"),
    [
        ("shm", {"same_host": False}, "does not share memory with the learner"),
        ("nccl", {"source": None}, r"the learner sends none from device memory: .*\(gpu_memory.budget_gib\)"),
        ("nccl", {"devices": ()}, "the engine is not on a CUDA device"),
        ("nccl", {"devices": on("gpu-0")}, "NCCL refuses two processes on one"),
        ("nccl", {"open_network": False}, "NCCL encrypts nothing"),
        ("nccl", {"devices": on("gpu-1", free=GIB)}, r"needs 4.5 GiB, and gpu-1 has 1.0 free \(give the engine less"),
        ("cuda_ipc", {"devices": ()}, "the engine is not on a CUDA device"),
        (
            "cuda_ipc",
            {"devices": on("gpu-0"), "same_host": False},
            r"on gpu-0, not on the learner's GPU \(gpu-0\) alone",
        ),
        ("cuda_ipc", {"devices": on("gpu-1")}, r"on gpu-1, not on the learner's GPU \(gpu-0\) alone"),
        ("cuda_ipc", {"devices": on("gpu-0", free=GIB)}, "needs 4.0 GiB, and gpu-0 has 1.0 free"),
    ],
)
def test_a_channel_that_cannot_work_is_refused_with_the_fix(configured: str, facts: dict[str, Any], told: str) -> None:
    with pytest.raises(
        UserError, match=f"(?s)weights_channel is {configured}, but .*{told}.*Set rollout.weights_channel"
    ):
        choose(configured, **facts)


# --- no room on the learner's device --------------------------------------------------------------------


def no_room(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


NO_ROOM = "a copy of the weights to send .* finds no room on the learner's device"


@pytest.mark.parametrize("when", ["at the first request", "at a later publication"])
def test_a_learner_without_room_for_a_copy_trains_on_and_sends_nothing_from_there(
    learner: LearnerHalf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    learner.publish(1, some_weights(1))
    learner.device_weights.source = LEARNERS
    if when == "at the first request":
        monkeypatch.setattr(learner.device_weights, "_from_file", no_room)
    else:
        assert isinstance(ask(learner, 1), TransferStart)
        monkeypatch.setattr("asyncrl_plugins.device_channels.sender.pack", no_room)
        learner.publish(2, some_weights(2))
        assert learner.device_weights._kept is None
    for version in (3, 4):
        answer = ask(learner, learner.publication.versions[-1])
        assert isinstance(answer, Error)
        assert answer.code is ErrorCode.WRONG_CHANNEL
        assert re.search(NO_ROOM, answer.reason)
        learner.publish(version, some_weights(version))
    assert caplog.text.count("From now on none is sent from there") == 1
    assert learner.device_weights.source is None  # servers that join later do not ask
