"""Settings of engines that other plug-ins bring: 8-bit weights, versions over device channels, composed models."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from asyncrl.config.schema import RunConfig
from asyncrl_plugins.vllm import rules, start
from tests.conftest import small_config
from tests.plugins.compose.tiny_composed import COMPOSED, compose, parts

__all__ = ["parts"]
MakeConfig = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("rollout", "problem"),
    [
        ({"weights_channel": "nccl"}, "takes new weights from host memory"),
        (
            {"quantization": "fp8"},
            r"sglang, whose fp8 layers would take .* Set rollout.engine=hf or rollout.engine=vllm",
        ),
    ],
)
def test_sglang_refuses_device_channels_and_8_bits(
    make_config: MakeConfig, rollout: dict[str, str], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        make_config(rollout={"engine": "sglang", "device": "cpu", **rollout})


def test_cuda_ipc_to_two_gpus_is_refused(make_config: MakeConfig) -> None:
    rollout = {"engine": "vllm", "tensor_parallel_size": 2, "weights_channel": "cuda_ipc"}
    with pytest.raises(ValidationError, match=r"(?s)shares the memory of one GPU.*Set rollout\.weights_channel=auto"):
        make_config(rollout=rollout)


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


def test_vllm_is_told_which_layers_and_needs_16_bits_and_a_gpu_with_fp8(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(model={"dtype": "bfloat16"}, rollout={"engine": "vllm", "quantization": "fp8"})
    text = SimpleNamespace(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2)
    arguments = start.engine_arguments(config, cuda=False, text_config=text, banned=[])
    assert arguments["quantization_config"]["linear"] == {"weight": "fp8_per_channel_static"}
    (ignored,) = arguments["quantization_config"]["ignore"]
    pattern = re.compile(ignored.removeprefix("re:"))
    assert pattern.match("visual.blocks.0.attn.qkv")
    assert pattern.match("model.multi_modal_projector.linear_1")
    assert not pattern.match("language_model.model.layers.0.self_attn.qkv_proj")
    assert rules.setting_problems(config, cuda=False) == []
    plain = make_config(model={"dtype": "bfloat16"}, rollout={"engine": "vllm"})
    assert "quantization" not in start.engine_arguments(plain, cuda=False, text_config=text, banned=[])
    (problem,) = rules.setting_problems(make_config(rollout=config.rollout.model_dump()), cuda=False)
    assert "model.dtype is float32" in problem
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    (problem,) = rules.setting_problems(config, cuda=True)
    assert "compute capability 8.0" in problem
    with_adapter = make_config(
        model={"dtype": "bfloat16", "lora": {"rank": 4}}, rollout={"engine": "vllm", "quantization": "int8"}
    )
    assert rules.setting_problems(with_adapter, cuda=True) == []
    (problem,) = rules.setting_problems(with_adapter, cuda=False)
    assert "adapters" in problem


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({}, None),
        ({"rollout": {"quantization": "nf4"}}, "engine is vllm: only hf samples with weights of 4 bits"),
        (
            {"algorithm": {"correction": {"kind": "none"}}},
            r"samples with a base in model\.dtype: the policy that samples is not the learner's.*"
            r"Set algorithm\.correction\.kind=token_tis .*, or set rollout\.engine=hf",
        ),
        ({"algorithm": {"proximal": "loglinear"}}, "proximal is loglinear, under which nothing weighs"),
    ],
)
def test_beside_a_learner_with_a_base_in_4_bits_vllm_needs_a_correction(
    make_config: MakeConfig, sections: dict[str, dict[str, Any]], problem: str | None
) -> None:
    model = {"lora": {"rank": 4}, "quantization": "nf4"}
    given = {**sections, "rollout": {"engine": "vllm", **sections.get("rollout", {})}}
    if problem is None:
        config = make_config(model=model, **given)
        assert config.rollout.precision("nf4") == ""
        return
    with pytest.raises(ValidationError, match=problem):
        make_config(model=model, **given)


@pytest.mark.parametrize(
    ("parts_of_model", "missing"),
    [
        (("siglip", "qwen2", "connector=mlp", "feature_layer=-1"), ""),
        (("clip", "wide", "connector=linear", "feature_layer=-1"), "whose connector has the activation linear"),
        (("dinov2", "qwen2", "connector=identity", "feature_layer=-1"), "with a tower of the type dinov2"),
        *(
            (("siglip", "qwen2", *words), "with two towers, a resampler, a Q-Former or a")
            for words in COMPOSED.values()
        ),
    ],
)
def test_models_that_vllm_does_not_serve_are_named_when_composed_and_refused(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], parts_of_model: tuple[str, ...], missing: str
) -> None:
    tower, language, *words = parts_of_model
    target = tmp_path / "vlm"
    assert compose(parts, target, f"vision_tower={tower}", f"language_model={language}", *words) == 0
    engines = f"hf alone: vLLM knows no LLaVA {missing}" if missing else "hf or vllm"
    assert f"rollout.engine  {engines}" in capsys.readouterr().out
    problems = rules.model_problems(small_config(target, parts, tmp_path / "run", rollout={"engine": "vllm"}))
    assert ("vLLM" in str(problems)) == bool(missing)
