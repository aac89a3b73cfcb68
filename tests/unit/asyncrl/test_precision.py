"""model.dtype=auto, decided once for both sides, and how far their log-probs may then be apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.devices import device
from asyncrl.devices.device import resolve_dtype
from asyncrl.models.loading import load_model
from asyncrl.service_entry import resolved
from tests.rigs.alignment_rig import limit_of

MakeConfig = Callable[..., RunConfig]
CPU = torch.device("cpu")


def on_devices(make_config: MakeConfig, learner: str, rollout: str, dtype: str = "auto") -> RunConfig:
    return make_config(model={"dtype": dtype}, learner={"device": learner}, rollout={"device": rollout})


def pretend(monkeypatch: pytest.MonkeyPatch, *, gpus: bool, bf16: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation)


@pytest.mark.parametrize(
    ("learner", "rollout", "gpus", "bf16", "meant"),
    [
        ("auto", "auto", False, True, "float32"),
        ("auto", "auto", True, True, "bfloat16"),
        ("auto", "auto", True, False, "float32"),  # before Ampere: torch would emulate it, vLLM refuses it
        ("cuda:1", "cuda", True, True, "bfloat16"),
        ("cuda", "cpu", True, True, "float32"),
        ("cpu", "auto", True, True, "float32"),
    ],
)
def test_weights_are_bf16_where_both_sides_are_on_gpus(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    learner: str,
    rollout: str,
    gpus: bool,
    bf16: bool,
    meant: str,
) -> None:
    pretend(monkeypatch, gpus=gpus, bf16=bf16)
    assert resolve_dtype(on_devices(make_config, learner, rollout)).model.dtype == meant
    for explicit in ("float32", "bfloat16"):
        assert resolve_dtype(on_devices(make_config, learner, rollout, explicit)).model.dtype == explicit


@pytest.mark.parametrize(
    ("instructions", "width", "learner", "rank", "meant"),
    [
        ((True, False), 512, "auto", 8, "bfloat16"),
        ((False, True), 4096, "cpu", 8, "bfloat16"),
        ((True, True), 4096, "cpu", 0, "float32"),  # all weights learned slower on the sanity set
        ((True, True), 511, "auto", 8, "float32"),  # a small model's products gain less than the conversions cost
        ((False, False), 4096, "auto", 8, "float32"),
        ((True, True), 4096, "cuda", 8, "float32"),  # the server is on the CPU
    ],
)
def test_a_cpu_with_its_own_instructions_has_bf16_under_adapters_to_a_wide_model(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    instructions: tuple[bool, bool],
    width: int,
    learner: str,
    rank: int,
    meant: str,
) -> None:
    pretend(monkeypatch, gpus=learner == "cuda")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions[0])
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: instructions[1])
    monkeypatch.setattr(device, "read_config", lambda _: {"text_config": {"hidden_size": width}})
    devices = {"learner": {"device": learner}, "rollout": {"device": "cpu"}}
    for given, dtype in (("auto", meant), ("float32", "float32"), ("bfloat16", "bfloat16")):
        config = make_config(model={"dtype": given, "lora": {"rank": rank}}, **devices)
        assert resolve_dtype(config).model.dtype == dtype


def test_a_service_has_decided_before_it_loads_anything(make_config: MakeConfig) -> None:
    config = on_devices(make_config, "auto", "auto")
    with pytest.raises(ValueError, match="resolve_dtype"):  # transformers and vLLM know another `auto`
        load_model(config.model, device=CPU)
    parameters = load_model(resolved(config).model, device=CPU).parameters()
    assert {parameter.dtype for parameter in parameters} == {torch.float32}


@pytest.mark.parametrize(
    ("rollout", "dtype", "limit"),
    [("cpu", "float32", 1e-3), ("cuda", "float32", 0.025), ("cpu", "bfloat16", 1.0), ("cuda", "bfloat16", 1.0)],
)
def test_fp32_may_differ_more_where_attention_is_in_tf32(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, rollout: str, dtype: str, limit: float
) -> None:
    pretend(monkeypatch, gpus=True)
    config = on_devices(make_config, "cpu", rollout, dtype)
    assert limit_of(config) == pytest.approx(limit)
    asked = config.model_copy(update={"alignment": config.alignment.model_copy(update={"max_logprob_difference": 0.5})})
    assert limit_of(asked) == 0.5


def test_fp32_models_are_computed_without_tf32(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch computes convolutions, of a vision tower's patches, in TF32 by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    load_model(make_config().model, device=CPU)
    assert not torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"
