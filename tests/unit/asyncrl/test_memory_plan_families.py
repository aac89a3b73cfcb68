"""Every folder with a config.json is planned, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from asyncrl.attention import shared_prefix
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.memory_plan.live_bytes import LiveBytes, nbytes
from asyncrl.memory_plan.plan import check_plan, make_plan
from asyncrl.memory_plan.rehearsal import NoPlanError, rehearse, train_pass
from asyncrl.models.loading import load_model, model_class

MakeConfig = Callable[..., RunConfig]

PROMPT, RESPONSE, GROUP = 40, 8, 2
TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
TOWER: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
IMAGE: dict[str, Any] = {"image_token_id": 5}


def llava() -> Any:
    tower = {"model_type": "clip_vision_model", **TOWER, "image_size": 16, "patch_size": 4, "projection_dim": 16}
    return transformers.LlavaConfig(**IMAGE, vision_config=tower, text_config={"model_type": "llama", **TEXT})


def internvl() -> Any:
    tower = {**TOWER, "image_size": [16, 16], "patch_size": [4, 4]}
    return transformers.InternVLConfig(**IMAGE, vision_config=tower, text_config={"model_type": "qwen2", **TEXT})


def qwen3_moe() -> Any:
    return transformers.Qwen3MoeConfig(**TEXT, **EXPERTS)


def qwen3_vl_moe() -> Any:
    text = {**TEXT, **EXPERTS, **ROPE}
    return transformers.Qwen3VLMoeConfig(
        **IMAGE,
        video_token_id=6,
        vision_start_token_id=7,
        vision_end_token_id=8,
        text_config=text,
        vision_config=QWEN_TOWER,
    )


def gpt2(**dropout: Any) -> Any:
    return transformers.GPT2Config(n_embd=32, n_head=2, n_layer=2, n_positions=256, vocab_size=128, **dropout)


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def planned(make_config: MakeConfig, folder: Path, hf_config: Any, **sections: dict[str, Any]) -> RunConfig:
    hf_config.save_pretrained(folder)
    return make_config(
        **{
            "model": {"path": str(folder), **sections.pop("model", {})},
            "data": {"max_prompt_length": PROMPT, "max_response_length": RESPONSE, "val_files": []},
            "batch": {"group_size": GROUP, "tokens_per_microbatch": 2 * (PROMPT + GROUP * RESPONSE)},
            "learner": {"device": "cpu"},
            "rollout": {"device": "cpu", "max_concurrent_sequences": 4},
            **sections,
        }
    )


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        (llava, "bfloat16"),
        (internvl, "float32"),
        (qwen3_moe, "float32"),
        (qwen3_vl_moe, "bfloat16"),
    ],
)
def test_other_families_are_planned(
    make_config: MakeConfig, tmp_path: Path, family: Callable[[], Any], dtype: str
) -> None:
    """Against the same pass of the real weights on the CPU."""
    config = planned(make_config, tmp_path, family(), model={"dtype": dtype})
    plan = rehearse(config)
    shared_prefix.register()
    model = random_model(config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters()]
    with LiveBytes("cpu", known=[*model.parameters(), *model.buffers(), *gradients]) as live:
        train_pass(model, config, torch.device("cpu"))
    assert nbytes([*model.parameters(), *model.buffers()]) == plan.weights
    assert live.peak <= 1.1 * plan.passing <= 2 * live.peak


def random_model(config: RunConfig) -> Any:
    hf_config = transformers.AutoConfig.from_pretrained(config.model.path)
    attention: Any = shared_prefix.SHARED_PREFIX_ATTENTION
    if getattr(hf_config, "vision_config", None) is not None:
        attention = {"text_config": attention, "vision_config": "sdpa"}
    dtype = getattr(torch, config.model.dtype)
    return model_class(hf_config).from_config(hf_config, dtype=dtype, attn_implementation=attention).train()


def test_dropout_is_refused_with_its_keys_before_weights_are_loaded(make_config: MakeConfig, tmp_path: Path) -> None:
    config = planned(make_config, tmp_path, gpt2(embd_pdrop=0.0), gpu_memory={"budget_gib": 1})
    said = r"dropout \(resid_pdrop=0.1, attn_pdrop=0.1\).*Set them to 0 in its config.json"
    with pytest.raises(UserError, match=said):
        check_plan(config)
    with pytest.raises(UserError, match=said):
        load_model(config.model, device=torch.device("cpu"), text_attention=shared_prefix.SHARED_PREFIX_ATTENTION)
    without = planned(make_config, tmp_path, gpt2(**NO_DROPOUT))
    assert rehearse(without).parameters == sum(p.numel() for p in random_model(without).parameters())


def test_a_family_whose_rows_are_not_packed_has_no_plan(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(NoPlanError, match=r"family gemma2 .*rows are computed one at a time .*takes softcap"):
        make_plan(planned(make_config, tmp_path, transformers.Gemma2Config(**TEXT)))


def test_what_no_rehearsal_foresaw_is_refused_by_name(make_config: MakeConfig, tmp_path: Path) -> None:
    shape = transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=128)
    config = planned(make_config, tmp_path, shape)
    said = r"memory cannot be planned for models of the family mamba \(.*\(\w+: .* leave gpu_memory.budget_gib"
    with pytest.raises(UserError, match=said):
        make_plan(config)
