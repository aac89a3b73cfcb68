"""The GPU of each process of a launched run, with lists of GPUs that a machine could have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.checks import inputs
from asyncrl.config.schema import RunConfig
from asyncrl.devices.device import visible_gpus
from asyncrl.devices.gpu_assignment import assign_gpus, check_assignment, describe_assignment, listed_gpus
from asyncrl.errors import UserError
from asyncrl.launch.processes import learner_service, server_services
from asyncrl.memory_plan.plan import device_sharing, servers_per_gpu

MakeConfig = Callable[..., RunConfig]
UUIDS = ("GPU-8932f937", "GPU-5ebe9e43", "MIG-3eb87630")


def run(
    make_config: MakeConfig, learner: str = "auto", server: str = "auto", /, budget_gib: float = 0, **rollout: Any
) -> RunConfig:
    """A configuration with these devices."""
    budget = {"budget_gib": budget_gib}
    return make_config(learner={"device": learner}, rollout={"device": server, **rollout}, gpu_memory=budget)


@pytest.mark.parametrize(
    ("gpus", "learner", "rollout", "servers", "width", "wanted"),
    [
        (0, "auto", "auto", 2, 1, "learner cpu; rollout_server-1 cpu; rollout_server-2 cpu"),
        (2, "auto", "auto", 1, 1, "learner g0; rollout_server g1"),
        (3, "cuda", "cuda", 2, 1, "learner g0; rollout_server-1 g1; rollout_server-2 g2"),
        (5, "auto", "auto", 2, 2, "learner g0; rollout_server-1 g1,g2; rollout_server-2 g3,g4"),
        (3, "cuda:1", "cuda", 1, 2, "learner g1; rollout_server g0,g2"),
        (2, "auto", "cuda:0", 1, 1, "learner g1; rollout_server g0"),
        (2, "cpu", "auto", 2, 1, "learner cpu; rollout_server-1 g0; rollout_server-2 g1"),
        (4, "auto", "cpu", 2, 1, "learner g0; rollout_server-1 cpu; rollout_server-2 cpu"),
    ],
)
@pytest.mark.usefixtures("wide_hf")
def test_each_process_has_gpus_of_its_own(
    make_config: MakeConfig, gpus: int, learner: str, rollout: str, servers: int, width: int, wanted: str
) -> None:
    config = run(make_config, learner, rollout, servers=servers, tensor_parallel_size=width)
    names = [f"g{number}" for number in range(gpus)]
    assert describe_assignment(check_assignment(config, names), names) == wanted


@pytest.mark.parametrize(
    ("gpus", "rollout", "servers", "fixes"),
    [
        (1, "auto", 1, ["gpu_memory.budget_gib=N", "trainer.mode=sync learner.max_staleness=0"]),
        (3, "auto", 4, [r"Set rollout\.servers=2, or gpu_memory\.budget_gib=N"]),
        (4, "cuda:1", 2, [r"rollout_server-1 1; rollout_server-2 1\)", r"Set rollout\.device=cuda \("]),
    ],
)
def test_two_processes_on_one_gpu_need_a_budget(
    make_config: MakeConfig, gpus: int, rollout: str, servers: int, fixes: list[str]
) -> None:
    names = list(map(str, range(gpus)))
    config = run(make_config, "auto", rollout, servers=servers)
    for fix in ["each would take memory as if it were alone", *fixes]:
        with pytest.raises(UserError, match=fix):
            check_assignment(config, names)
    shared = check_assignment(run(make_config, "auto", rollout, servers=servers, budget_gib=24), names)
    assert shared.is_shared_with_learner == (gpus == 1)
    assert shared.servers_per_gpu == -(-servers // max(1, gpus - 1)) if rollout == "auto" else servers


def test_who_takes_turns_is_on_one_gpu(make_config: MakeConfig) -> None:
    config = make_config(trainer={"mode": "sync"}, rollout={"device": "cuda:0"})
    assert describe_assignment(check_assignment(config, ["0", "1"]), ["0", "1"]) == "learner 0; rollout_server 0"


def test_the_services_see_what_they_were_assigned_from_the_users_own_list(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr(inputs, "DRIVERS", (tmp_path,))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ", ".join(UUIDS))
    config = run(make_config, servers=2)
    gpus = inputs.gpus_of_run(config.learner.device, config.rollout.device)
    assert gpus == UUIDS
    file = tmp_path / "config.yaml"
    services = [learner_service(config, file, resume=False, gpus=gpus), *server_services(config, file, gpus=gpus)]
    assert [service.environment["CUDA_VISIBLE_DEVICES"] for service in services] == list(UUIDS)
    named = run(make_config, "cuda:2", servers=2)
    assert "CUDA_VISIBLE_DEVICES" not in learner_service(named, file, resume=False, gpus=gpus).environment
    # A server sees one GPU, and plans with what all of them have.
    for name, value in services[1].environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert visible_gpus() == UUIDS
    assert (device_sharing(config), servers_per_gpu(config)) == ("apart", 1)


@pytest.mark.usefixtures("wide_hf")
def test_ranks_take_turns_on_their_gpus_with_one_server(make_config: MakeConfig) -> None:
    config = make_config(
        trainer={"mode": "sync"},
        learner={"engine": "fsdp2", "num_processes": 2, "device": "cuda"},
        rollout={"tensor_parallel_size": 2, "device": "cuda"},
    )
    assigned = check_assignment(config, ["0", "1", "2"])
    assert (assigned.learner, assigned.servers) == ((0, 1), ((0, 1),))
    with pytest.raises(UserError, match="num_processes is 2, and there are 1 GPU"):
        check_assignment(config, ["0"])


def test_a_launch_on_too_few_gpus_is_refused_before_anything_is_written(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(inputs, "DRIVERS", (tmp_path,))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match=r"would share GPUs \(learner 0; rollout_server 0\)"):
        inputs.check_devices(run(make_config), ("learner", "rollout_server"))
    inputs.check_devices(run(make_config), ("learner",))  # a side that is started by itself
    inputs.check_devices(run(make_config, "cpu", "cpu"), ("learner", "rollout_server"))


def test_cudas_own_list_ends_at_the_first_entry_that_is_none() -> None:
    assert listed_gpus("2, 0,1") == ("2", "0", "1")
    assert listed_gpus("0,-1,1") == ("0",)
    assert listed_gpus("") == ()


def test_a_scripted_engine_takes_no_gpu(make_config: MakeConfig) -> None:
    config = make_config(rollout={"engine": "scripted", "servers": 3}, alignment={"rows": 0})
    assert assign_gpus(config, 1).servers == ((), (), ())
    assert check_assignment(config, ["0"]).learner == (0,)
