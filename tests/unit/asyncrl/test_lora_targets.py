"""`model.lora` resolved to layers, and everything about it that is refused before weights are loaded."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError
from asyncrl.model_files.folder import base_fingerprint
from asyncrl.models import loading
from asyncrl.models.loading import skeleton
from asyncrl.models.lora import (
    add_adapter,
    check_adapter,
    describe_adapter,
    folder_fingerprint,
    resolve_adapter,
    write_adapter_folder,
)
from asyncrl.models.small_copy import family_of

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(loading, "load_model", load)


def model(path: Path, **lora: Any) -> ModelConfig:
    free = {"freeze_vision_tower": False} if lora.get("vision_tower") else {}
    return ModelConfig.model_validate({"path": str(path), "dtype": "float32", "lora": {"rank": 4, **lora}, **free})


@pytest.fixture
def text_model(tmp_path: Path) -> Path:
    """A folder without weights: resolving needs none."""
    from transformers import Qwen2Config

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen2Config(vocab_size=320, intermediate_size=128, **sizes).save_pretrained(tmp_path / "text")
    return tmp_path / "text"


def ends(config: ModelConfig) -> set[str]:
    spec = resolve_adapter(config)
    assert spec is not None
    return {name.rpartition(".")[2] for name in spec.target_modules}


ATTENTION, MLP = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}


def test_all_linear_layers_of_the_language_model_by_default(tiny_model: Path, text_model: Path) -> None:
    spec = resolve_adapter(model(tiny_model))
    assert spec is not None
    assert (spec.rank, spec.alpha) == (4, 8), "alpha is twice the rank unless it is set"
    assert ends(model(tiny_model)) == ends(model(text_model)) == ATTENTION | MLP
    assert all(".language_model." in name for name in spec.target_modules)
    assert len(spec.target_modules) == 2 * 7
    assert resolve_adapter(ModelConfig(path=str(tiny_model), dtype="float32")) is None


def test_names_a_pattern_and_the_vision_tower(tiny_model: Path) -> None:
    assert ends(model(tiny_model, target_modules=["q_proj", "v_proj"])) == {"q_proj", "v_proj"}
    assert ends(model(tiny_model, target_modules=r".*layers\.1\.mlp\..*")) == MLP
    spec = resolve_adapter(model(tiny_model, vision_tower=True, alpha=3))
    assert spec is not None
    assert spec.alpha == 3
    assert any(".visual.blocks." in name for name in spec.target_modules)
    assert any(".merger." in name for name in spec.target_modules), "the connector, too"
    assert "lm_head" not in spec.target_modules


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"target_modules": ["q_porj", "v_proj"]}, "'q_porj' fits no linear layer"),
        ({"target_modules": "q_proj"}, "There are down_proj, "),
        ({"target_modules": ["embed_tokens"]}, "fits no linear layer"),
        ({"target_modules": ["qkv"]}, "those of the vision tower with model.lora.vision_tower=true"),
        ({"target_modules": []}, "is empty"),
        ({"target_modules": ".*(q_proj"}, "no regular expression"),
        (
            {"modules_to_save": ["lm_head"]},
            "'lm_head' is no part of this model's connector: there is model.visual.merger",
        ),
    ],
)
@pytest.mark.usefixtures("no_weights")
def test_targets_that_fit_nothing_are_refused_by_name(tiny_model: Path, lora: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve_adapter(model(tiny_model, **lora))
    assert said in str(caught.value)


@pytest.mark.usefixtures("no_weights")
def test_a_connector_that_is_trained_whole_has_no_adapters(tiny_model: Path) -> None:
    """It is named as in PEFT, or by what it is; a part inside another one is not named twice."""
    for names in (["connector"], ["merger"], ["merger", "merger.ln_q"]):
        spec = resolve_adapter(model(tiny_model, vision_tower=True, modules_to_save=names))
        assert spec is not None
        assert spec.modules_to_save == ("model.visual.merger",)
        assert not any(".merger." in name for name in spec.target_modules)
    with pytest.raises(ValueError, match=r"trains the connector whole .* but model\.lora\.rank is 0"):
        model(tiny_model, rank=0, modules_to_save=["merger"])


@pytest.mark.usefixtures("no_weights")
def test_without_peft_the_user_is_told_what_to_install(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.models.lora.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'asyncrl\[learner,rollout\]'"):
        resolve_adapter(model(tiny_model))
    assert resolve_adapter(ModelConfig(path=str(tiny_model), dtype="float32")) is None


# --- one base on both sides -------------------------------------------------------------------------------


def test_the_fingerprint_is_of_the_content_however_it_is_sharded(tiny_model: Path, tmp_path: Path) -> None:
    from asyncrl.models.loading import load_model

    own = base_fingerprint(model(tiny_model))
    sharded = tmp_path / "sharded"
    load_model(ModelConfig(path=str(tiny_model), dtype="float32"), device=torch.device("cpu")).save_pretrained(  # type: ignore[operator]
        sharded, max_shard_size="100KB"
    )
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    assert base_fingerprint(model(sharded)) == own

    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    tensors = load_file(other / "model.safetensors")
    name = max(tensors)
    flat = tensors[name].view(-1)
    flat[0] = torch.nextafter(flat[0], torch.tensor(9.0))
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    assert folder_fingerprint(model(other)) == folder_fingerprint(model(tiny_model)), "the architectures are the same"
    assert base_fingerprint(model(other)) != own, "one bit of one weight"


def test_a_folder_whose_weights_cannot_be_read_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="is cut off or damaged"):
        base_fingerprint(model(broken))
    weights.unlink()
    with pytest.raises(UserError, match=r"no model.safetensors"):
        base_fingerprint(model(broken))


def test_the_fingerprint_of_what_travels_knows_rank_alpha_and_layers(tiny_model: Path) -> None:
    kinds = [{}, {"rank": 8, "alpha": 8}, {"alpha": 9}, {"target_modules": ["q_proj"]}, {"modules_to_save": ["merger"]}]
    prints = {folder_fingerprint(model(tiny_model, **lora)) for lora in kinds}
    prints.add(folder_fingerprint(ModelConfig(path=str(tiny_model), dtype="float32")))
    assert len(prints) == len(kinds) + 1


NO_ADAPTERS: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": ({"n_layer": 1}, r"family gpt2 have no linear layers .*Set model.lora.rank=0"),
    "falcon_h1": (
        {"num_hidden_layers": 1, "vocab_size": 64},
        r"PEFT gives layers of the family falcon_h1 no .*out_proj",
    ),
    "nemotron_h": ({"vocab_size": 64}, r"PEFT gives layers of the family nemotron_h no .*out_proj.* Name others of "),
}


@pytest.mark.parametrize("family", NO_ADAPTERS)
def test_families_that_no_adapter_fits_are_refused_by_what_was_found(family: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    settings, said = NO_ADAPTERS[family]
    CONFIG_MAPPING[family](**settings).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=said):
        folder_fingerprint(model(tmp_path))


FUSED = {
    "phimoe": r"k_proj \(1\), o_proj \(1\), q_proj \(1\), v_proj \(1\)\. Fused .* without adapters",
    "qwen3_moe": r"k_proj \(1\), o_proj \(1\), .*\. Fused .* down_proj, gate_up_proj, without adapters",
    "glm4_moe": r"experts \(2\), .*Fused weights of experts: down_proj, gate_up_proj, with adapters",
}


@pytest.mark.parametrize("family", FUSED)
def test_what_of_experts_is_adapted_is_said(family: str, tmp_path: Path) -> None:
    """Routers, which are linear layers that choose, have no adapters, so that a pass computes; what is written is for
    the model that it is of."""
    from transformers import CONFIG_MAPPING

    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    layers = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "vocab_size": 64, "moe_intermediate_size": 16}
    kind: Any = CONFIG_MAPPING[family]
    kind(**sizes, **layers, pad_token_id=0).save_pretrained(tmp_path)
    config = model(tmp_path)
    adapter, made = resolve_adapter(config), family_of(config).model(None)
    assert adapter is not None
    add_adapter(made, adapter)
    made(input_ids=torch.zeros((1, 3), dtype=torch.long))
    assert re.search(FUSED[family], describe_adapter(made)), describe_adapter(made)
    other = skeleton(config)
    add_adapter(other, adapter)
    names = [(f"base_model.model.{name.replace('.policy', '')}", p) for name, p in other.named_parameters()]
    tensors = [(name, torch.zeros(p.shape)) for name, p in names if ".lora_" in name]
    write_adapter_folder(tmp_path / "adapter", adapter, tensors, base_path=config.path)
    check_adapter(config, tmp_path / "adapter")
