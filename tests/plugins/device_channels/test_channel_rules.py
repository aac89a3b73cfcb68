"""What contradicts a device channel is refused before anything is loaded, with the fix."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from asyncrl.checks.inputs import check_inputs
from asyncrl.config.gpu_assignment import check_assignment, describe_assignment
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl_plugins.vllm import start
from learner.network.publication import open_device_sender
from learner.service import Learner
from rollout_server.service import RolloutServer

MakeConfig = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("channel", "sections", "told"),
    [
        ("nccl", {"model": {"lora": {"rank": 4}}}, "model.lora trains adapters"),
        ("nccl", {"rollout": {"engine": "scripted"}}, "the scripted engine has no model"),
        ("nccl", {"learner": {"device": "cpu"}}, "learner.device is cpu"),
        ("cuda_ipc", {"rollout": {"device": "cpu"}}, "rollout.device is cpu"),
        ("cuda_ipc", {"rollout": {"engine": "vllm", "tensor_parallel_size": 2}}, "shares the memory of one GPU"),
        ("nccl", {"network": {"host": "10.0.0.5"}}, r"10.0.0.5, not loopback, .*\(network.insecure=true"),
        ("cuda_ipc", {"trainer": {"mode": "sync"}}, "trainer.mode is sync and rollout.weights_channel is cuda_ipc"),
        ("nccl", {"trainer": {"mode": "sync"}}, "trainer.mode is sync and rollout.weights_channel is nccl"),
    ],
)
def test_settings_that_contradict_the_channel_are_refused(
    make_config: MakeConfig, channel: str, sections: dict[str, Any], told: str
) -> None:
    sections = {**sections, "rollout": {**sections.get("rollout", {}), "weights_channel": channel}}
    with pytest.raises(ValidationError, match=f"(?s){told}.*Set rollout.weights_channel=auto"):
        make_config(**sections)


def test_ranks_have_no_whole_model_to_copy(make_config: MakeConfig) -> None:
    with pytest.raises(ValidationError, match=r"fsdp2, but rollout\.weights_channel is nccl"):
        make_config(learner={"engine": "fsdp2", "num_processes": 2}, rollout={"weights_channel": "nccl"})


def test_who_copies_within_one_gpu_is_on_one(make_config: MakeConfig) -> None:
    ipc = {"weights_channel": "cuda_ipc", "device": "cuda"}
    config = make_config(rollout=ipc, learner={"device": "cuda"}, gpu_memory={"budget_gib": 24})
    assert describe_assignment(check_assignment(config, ["0", "1"]), ["0", "1"]) == "learner 0; rollout_server 0"


@pytest.mark.parametrize(
    ("version_gib", "device_gib", "rollout", "share"),
    [
        (15, 80, {}, 0.798),  # 15.5 and 0.625 of a context, of which 6.4 lie beyond vLLM's 73.6
        (15, 80, {"weights_channel": "shm"}, 0.92),
        (15, 80, {"weights_channel": "cuda_ipc"}, 0.804),
        (15, 24, {}, 0.92),  # 7 GiB beside the weights: sequences come first
        (15, 24, {"weights_channel": "nccl"}, 0.328),
        (15, 40, {"tensor_parallel_size": 2}, 0.596),  # half of the weights, and a whole version
        (1, 80, {}, 0.92),
    ],
)
def test_vllm_leaves_room_for_a_version_that_arrives_on_its_gpu(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    version_gib: float,
    device_gib: int,
    rollout: dict[str, Any],
    share: float,
) -> None:
    version = torch.empty(int(version_gib * 2**30), dtype=torch.uint8, device="meta")
    monkeypatch.setattr(start, "skeleton", lambda model: None)
    monkeypatch.setattr(start, "published_tensors", lambda model: [("all", version)])
    device = {"learner": {"device": "auto"}}
    config = make_config(**device, rollout={"engine": "vllm", "device": "auto", **rollout})
    assert start.share_beside_a_version(config, device_gib << 30) == pytest.approx(share, abs=0.0011)
    arrives_elsewhere = [{"trainer": {"mode": "sync"}, **device}, {"model": {"lora": {"rank": 8}}, **device}]
    for sections in [*arrives_elsewhere, {"learner": {"device": "cpu"}}]:
        if "weights_channel" not in rollout and "tensor_parallel_size" not in rollout:
            other = make_config(**sections, rollout={"engine": "vllm", "device": "auto"})
            assert start.share_beside_a_version(other, device_gib << 30) == start.VLLM_SHARE


def test_what_does_not_contradict_it_is_accepted(make_config: MakeConfig) -> None:
    for network in ({"host": "127.0.0.1"}, {"host": "localhost"}, {"host": "10.0.0.5", "insecure": True}):
        make_config(rollout={"weights_channel": "nccl"}, network=network)
    make_config(rollout={"weights_channel": "cuda_ipc"}, network={"host": "10.0.0.5"})
    make_config(rollout={"weights_channel": "auto"}, model={"lora": {"rank": 4}})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("channel", ["nccl", "cuda_ipc"])
def test_without_a_gpu_nothing_is_loaded(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, channel: str
) -> None:
    import asyncio

    config = make_config(rollout={"weights_channel": channel})
    told = (
        rf"weights_channel is {channel}, which needs a CUDA device .* is auto and torch .* sees none here.*set rollout"
    )
    monkeypatch.setattr("learner.service.find_start", None)
    monkeypatch.setattr("rollout_server.service.PromptProcessor", None)
    with pytest.raises(UserError, match=told):
        check_inputs(config, "learner", "rollout_server")
    with pytest.raises(UserError, match=told):
        Learner(config)
    with pytest.raises(UserError, match=told):
        asyncio.run(RolloutServer(config).run())


def test_where_the_device_is_lent_or_adapters_travel_there_is_nothing_to_send_from(make_config: MakeConfig) -> None:
    facts = SimpleNamespace(published_bytes=0)
    engine: Any = SimpleNamespace(adapter=None, device=torch.device("cpu"), facts=facts)
    publication: Any = None
    config, budget = make_config(), {"gpu_memory": {"budget_gib": 24}}
    assert not make_config(trainer={"mode": "sync"}).sends_device_versions
    assert not make_config(learner={"engine": "fsdp2"}).sends_device_versions
    assert config.sends_device_versions
    assert not make_config(**budget).sends_device_versions, "auto: the plan has no room for it"
    assert make_config(**budget, rollout={"weights_channel": "nccl"}).sends_device_versions
    assert open_device_sender(config.rollout, config.network, publication, engine, first_s=1) is not None
    engine.adapter = object()
    assert open_device_sender(config.rollout, config.network, publication, engine, first_s=1) is None
