"""Settings that contradict a device channel are refused before anything is loaded, with the fix."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from asyncrl.checks.inputs import check_inputs
from asyncrl.config.schema import RunConfig
from asyncrl.devices.gpu_assignment import check_assignment, describe_assignment
from asyncrl.errors import UserError
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
