"""Settings that the sglang engine refuses before it is started, and the parts that need no SGLang to be tested."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file, save_file

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError, UserError
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl_plugins.sglang import rules
from asyncrl_plugins.sglang.arguments import as_flags, served_folder, server_arguments, server_environment
from asyncrl_plugins.sglang.conversion import to_completion
from asyncrl_plugins.sglang.environment import SGLangEnvironment, look_into
from asyncrl_plugins.sglang.launch import OWNER_VARIABLE
from asyncrl_plugins.sglang.process import ENTRY, SGLangProcess
from asyncrl_plugins.sglang.weights import VersionFolders
from protocol.messages import Sampling
from rollout_server.engines.base import EngineDied, GenerationRequest, version_column
from tests.rigs.tiny_families import make_family, make_llava

MakeConfig = Callable[..., RunConfig]
FITTING = {"sglang": "0.5.23", "torch": "2.13.0+cpu", "transformers": "5.19.0"}


def sglang(make_config: MakeConfig, **sections: Any) -> RunConfig:
    return make_config(rollout={"engine": "sglang", "device": "cpu", **sections.pop("rollout", {})}, **sections)


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "stand_in", "cuda", "problem"),
    [
        ({}, True, False, ""),
        (
            {"sglang": "0.5.22"},
            True,
            False,
            r"sglang 0\.5\.22 is installed .* built for sglang 0\.5\.23\. Run: make inst",
        ),
        ({"sglang": ""}, True, False, "sglang none is installed"),
        ({"torch": "2.14.1"}, False, True, ""),
        ({"transformers": "5.18.0"}, True, False, r"transformers 5\.18\.0 is installed"),
        ({}, True, True, "stand-in for its kernels, which is for CPUs"),
    ],
)
def test_another_sglang_is_refused_with_the_command_that_mends_it(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, str],
    stand_in: bool,
    cuda: bool,
    problem: str,
) -> None:
    monkeypatch.setattr(rules, "look_into", lambda python: SGLangEnvironment({**FITTING, **changed}, stand_in))
    found = rules.installation_problems(sglang(make_config), cuda=cuda)
    assert bool(found) == bool(problem)
    if problem:
        with pytest.raises(UserError, match=problem):
            raise UserError("; ".join(found))


def test_a_missing_environment_is_named_and_what_is_in_one_is_read(make_config: MakeConfig, tmp_path: Path) -> None:
    config = sglang(make_config, rollout={"sglang": {"python": str(tmp_path / "python")}})
    (problem,) = rules.problems(config)
    assert f"no Python at {tmp_path}/python" in problem
    assert "make install-sglang" in problem
    here = look_into(Path(sys.executable))
    assert here is not None
    assert here.versions["transformers"] == "5.19.0"
    assert not here.has_stand_in


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"model": {"lora": {"rank": 4}}}, "model.lora.rank is 4, and adapters have not been run with sglang"),
        ({"rollout": {"weight_update": "keep"}}, "cached prefixes are of old weights"),
        ({"rollout": {"top_p": 0.9}}, "log-probs are of the distribution before it is cut off"),
        ({"rollout": {"tensor_parallel_size": 2}}, "the sglang engine runs on one device"),
        ({"model": {"float32_head": True, "dtype": "bfloat16"}}, "sglang computes logits in model.dtype"),
        ({"gpu_memory": {"budget_gib": 4.0}}, "nothing is known of sglang's memory"),
    ],
)
def test_what_it_cannot_do_on_any_machine_is_refused_with_the_configuration(
    make_config: MakeConfig, sections: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        sglang(make_config, **sections)


def test_arguments_that_belong_to_the_engine_and_models_that_were_not_compared_are_refused(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = sglang(make_config, rollout={"engine_args": {"kv_cache_dtype": "fp8_e5m2", "--tp-size": 2}})
    (problem,) = rules.argument_problems(config)
    assert "tp_size. Leave it out" in problem
    assert "kv_cache_dtype. Leave it out: rounded" in problem
    assert not rules.model_problems(config)
    small = make_family("qwen2_5_vl", tmp_path / "small")
    (problem,) = rules.model_problems(sglang(make_config, model={"path": str(small)}))
    assert "image patches of 294 values" in problem
    other = make_llava(tmp_path / "other")
    (problem,) = rules.model_problems(sglang(make_config, model={"path": str(other)}))
    assert "of the family llava, and what SGLang makes of its images has not been compared" in problem


def test_an_engines_record_of_versions_becomes_the_column_or_is_refused() -> None:
    assert version_column([(3, 0, 2), (5, 2, 5)], 5, "X").tolist() == [3, 3, 5, 5, 5]
    assert version_column([], 0, "X").tolist() == []
    for spans in ([], [(3, 0, 4)], [(3, 0, 2), (4, 3, 5)], [(3, 1, 5)]):
        with pytest.raises(BadStateError, match=r"X's record .* does not cover 5 tokens in order"):
            version_column(spans, 5, "X")


def answer(**changed: Any) -> dict[str, Any]:
    """SGLang's to two sampled tokens behind a prompt of two."""
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5, 4, None], [-0.25, 9, None]],
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
    }
    return {"output_ids": [4, 9], "prompt_token_ids": [1, 2], "meta_info": {**meta, **changed}}


def request(*, stops: tuple[int, ...] = (9,)) -> GenerationRequest:
    sampling = Sampling(temperature=1.0, max_new_tokens=8, stop_token_ids=stops, banned_token_ids=(5,))
    return GenerationRequest(1, EncodedPrompt.of_text(np.asarray([1, 2], np.int32)), 1, 0, sampling)


def test_an_answer_becomes_columns_and_one_that_is_not_whole_is_refused() -> None:
    done = to_completion(request(), 0, answer(), 3)
    assert (done.token_ids.tolist(), done.versions.tolist()) == ([4, 9], [3, 4])
    assert done.logprobs.tolist() == [-0.5, -0.25]
    part = answer(finish_reason={"type": "abort"})
    assert to_completion(request(), 0, part, 3, was_interrupted=True).finish_reason is None
    for stops, changed, error, message in (
        ((8,), {}, UserError, r"at the id 9, an end of text by the model folder .* ends at \(8,\)"),
        ((9,), {"finish_reason": {"type": "abort"}}, BadStateError, "SGLang ended ticket 1 with .*abort"),
        ((9,), {"output_token_logprobs": [[-0.5, 4, None]]}, BadStateError, "log-probs of 1 tokens for 2 sampled"),
        ((9,), {"weight_versions": [{"version": "3", "start": 0, "end": 1}]}, BadStateError, "does not cover 2"),
    ):
        with pytest.raises(error, match=message):
            to_completion(request(stops=stops), 0, answer(**changed), 3)
    with pytest.raises(UserError, match=r"row a turn: .* 2 and 2 tokens, another one at position 1"):
        to_completion(request(), 0, {**answer(), "prompt_token_ids": [1, 3]}, 3)


# --- start and end ------------------------------------------------------------------------------


def test_arguments_are_flags_and_the_users_come_last(make_config: MakeConfig, tmp_path: Path) -> None:
    import torch

    config = sglang(make_config, rollout={"engine_args": {"schedule_policy": "fcfs", "bucket_e2e": [1, 2]}})
    text: Any = type("Text", (), {"num_attention_heads": 2, "hidden_size": 64, "num_hidden_layers": 2})
    size = {"shortest_edge": 784}
    arguments = server_arguments(config, tmp_path, 5, device=torch.device("cpu"), image_size=size, text_config=text)
    words = as_flags(arguments)
    assert words[words.index("--schedule-policy") + 1] == "fcfs"
    assert words[words.index("--bucket-e2e") + 1 :][:2] == ["1", "2"]
    assert words[words.index("--mm-process-config") + 1] == '{"image": {"size": {"shortest_edge": 784}}}'
    assert "--trust-remote-code" not in words
    assert words[words.index("--enable-metrics") + 1].startswith("--")


def test_its_environment_has_nothing_of_ours_and_no_cache_of_images(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("SGLANG_VLM_CACHE_SIZE_MB", "100")
    environment = server_environment(sglang(make_config), cuda=False)
    assert "PYTHONPATH" not in environment
    assert environment["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in server_environment(sglang(make_config), cuda=True)


def test_a_qwen2_vl_is_served_with_the_key_that_sglang_wants(tmp_path: Path) -> None:
    model, scratch = tmp_path / "model", tmp_path / "scratch"
    for folder in (model, scratch):
        folder.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "config.json").write_text("{}")
    described = {"model_type": "qwen2_vl", "vision_config": {"in_channels": 3}}
    served = served_folder(model, described, scratch)
    assert '"in_chans": 3' in (served / "config.json").read_text()
    assert (served / "model.safetensors").read_bytes() == b"weights"
    assert served_folder(model, {"model_type": "qwen3_vl"}, scratch) == model


def stand_in(folder: Path, code: str) -> Path:
    """A Python for which `sglang.launch_server` is this code."""
    package = folder / "packages" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(code)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder}/packages exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (
            "print('no such model'); raise SystemExit(3)",
            EngineDied,
            r"ended with exit code 3\. Its last output:\nno such",
        ),
        ("print('usage: --x'); raise SystemExit(2)", UserError, r"rollout\.engine_args\. SGLang's.*\nusage: --x"),
        ("import time; time.sleep(60)", EngineDied, r"has not started in 1 s \(network\.start_timeout_s\)"),
    ],
)
def test_a_start_that_fails_says_why(tmp_path: Path, code: str, error: type[Exception], message: str) -> None:
    process = SGLangProcess(stand_in(tmp_path, code), 9)

    async def start() -> None:
        try:
            await process.start([], {**os.environ, OWNER_VARIABLE: str(os.getpid())})
            await process.wait_for_answer(1.0 if "sleep" in code else 30.0)
        finally:
            await process.stop()

    with pytest.raises(error, match=f"(?s){message}"):
        asyncio.run(start())


def test_its_process_group_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '300']).pid, flush=True); time.sleep(300)"
    owner = subprocess.Popen(["sleep", "300"])
    try:
        leader = subprocess.Popen(
            [stand_in(tmp_path, code), ENTRY],
            env={**os.environ, OWNER_VARIABLE: str(owner.pid)},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert leader.stdout is not None
        other = psutil.Process(int(leader.stdout.readline()))
        assert other.is_running()
        owner.kill()
        assert leader.wait(timeout=10) == -signal.SIGKILL
        deadline = time.monotonic() + 10
        while other.is_running() and other.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        owner.kill()
        owner.wait()


# --- weights ------------------------------------------------------------------------------------


def test_a_version_has_the_names_of_the_folders_files_and_a_folder_of_other_names_is_refused(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = make_family("qwen2_vl", tmp_path / "model")
    config = sglang(make_config, model={"path": str(folder)})
    VersionFolders(config.model)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({f"old.{name}" if "norm" in name else name: t for name, t in tensors.items()}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"that the files in .* do not have .*norm.* and \d+ of theirs"):
        VersionFolders(config.model)
