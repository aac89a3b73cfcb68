"""Parts composed into a vision-language model: their weights, its words, and what does not go together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from asyncrl.cli import main as asyncrl
from asyncrl.config.sections import ModelConfig
from asyncrl.demo.model import build_tokenizer
from asyncrl.models.loading import load_model
from asyncrl.models.processing import PromptProcessor
from rollout_server.engines.vllm.rules import model_problems
from tests.conftest import small_config
from tests.unit.asyncrl.test_measured_prompts import picture, prompt_of

WIDTH = 32
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TOWER: dict[str, Any] = {**SIZES, "image_size": 28, "patch_size": 7}
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}\n{% endfor %}assistant:"
SQUARE = {"height": 28, "width": 28}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with towers (of CLIP the whole model, with its text part) and language models, all random."""
    folder = tmp_path_factory.mktemp("parts")
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(1)
    for name, model in {
        "qwen": transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, **words(tokenizer))),
        "wide": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**{**SIZES, "hidden_size": 64}, **words(tokenizer))
        ),
        "phi": with_bias(transformers.PhiForCausalLM(transformers.PhiConfig(**SIZES, **words(tokenizer)))),
    }.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    clip = transformers.CLIPConfig(text_config={**SIZES, "vocab_size": 64}, vision_config=TOWER, projection_dim=WIDTH)
    transformers.CLIPModel(clip).save_pretrained(folder / "clip")
    transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**TOWER)).save_pretrained(folder / "siglip")
    transformers.Dinov2Model(transformers.Dinov2Config(**TOWER)).save_pretrained(folder / "dinov2")
    crop: Any = {"size": {"shortest_edge": 28}, "crop_size": SQUARE}
    transformers.CLIPImageProcessor(**crop).save_pretrained(folder / "clip")
    transformers.SiglipImageProcessor(size=SQUARE).save_pretrained(folder / "siglip")
    transformers.BitImageProcessor(**crop).save_pretrained(folder / "dinov2")
    return folder


def words(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }


def with_bias(model: Any) -> Any:
    torch.nn.init.normal_(model.lm_head.bias)
    return model


def composed(parts: Path, target: Path, tower: str, language: str, *more: str) -> int:
    return asyncrl(
        ["compose", str(target), f"vision_tower={parts / tower}", f"language_model={parts / language}", *more]
    )


@pytest.mark.parametrize(
    ("tower", "language", "connector", "engines"),
    [
        ("siglip", "qwen", "mlp", "hf or vllm"),
        ("clip", "wide", "linear", "hf alone: vLLM knows no LLaVA whose connector has the activation linear"),
        ("dinov2", "qwen", "identity", "hf alone: vLLM knows no LLaVA with a tower of the type dinov2"),
    ],
)
def test_parts_keep_their_weights_and_read_images(
    parts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tower: str,
    language: str,
    connector: str,
    engines: str,
) -> None:
    target = tmp_path / "vlm"
    assert composed(parts, target, tower, language, f"connector={connector}", "feature_layer=-1") == 0
    assert f"rollout.engine  {engines}" in capsys.readouterr().out
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(target)
    with safe_open(target / "model.safetensors", "pt") as opened:
        level = "embeddings." if tower == "dinov2" else "vision_model.embeddings."
        assert any(name.startswith(f"vision_tower.{level}") for name in opened.keys())  # noqa: SIM118 (no mapping)
    text = transformers.AutoModelForCausalLM.from_pretrained(parts / language)
    whole = transformers.AutoModel.from_pretrained(parts / tower)
    theirs = (whole.vision_model if tower == "clip" else whole).state_dict()
    assert theirs
    for name, tensor in model.model.vision_tower.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name
    for name, tensor in text.base_model.state_dict().items():
        mine = model.model.language_model.state_dict()[name]
        assert torch.equal(mine[: len(tensor)], tensor), name
    features = torch.randn(3, WIDTH)
    said = model.model.multi_modal_projector(features)
    if connector == "identity":
        assert torch.equal(said, features)
    if connector == "linear":
        torch.testing.assert_close(model.model.multi_modal_projector(2 * features), 2 * said)

    processor = PromptProcessor(ModelConfig(path=str(target)))
    prompt, blobs = prompt_of(picture(60, 30))
    encoded = processor.encode(prompt, blobs)
    assert processor.render(prompt) == "user: Look: <image>What is it?\nassistant:"
    assert encoded.media_tokens == 16
    loaded: Any = load_model(ModelConfig(path=str(target), dtype="float32"), device=torch.device("cpu"))
    logits = loaded(
        input_ids=torch.from_numpy(encoded.token_ids).long()[None], pixel_values=encoded.pixel_values
    ).logits
    assert logits.isfinite().all()
    config = small_config(target, parts, tmp_path / "run", rollout={"engine": "vllm"})
    assert bool(model_problems(config)) == (engines != "hf or vllm")


def test_a_connector_is_its_seeds(parts: Path, tmp_path: Path) -> None:
    settings = tmp_path / "parts.yaml"
    settings.write_text(f"vision_tower: {parts / 'siglip'}\nlanguage_model: {parts / 'qwen'}\nseed: 1\n")
    connectors = []
    for number, more in enumerate(([], [], ["seed=2"])):
        assert asyncrl(["compose", str(tmp_path / str(number)), str(settings), *more]) == 0
        model: Any = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / str(number))
        connectors.append(model.model.multi_modal_projector.linear_1.weight)
    assert torch.equal(connectors[0], connectors[1])
    assert not torch.equal(connectors[0], connectors[2])


@pytest.mark.parametrize(
    ("tower", "language", "more", "says"),
    [
        ("siglip", "wide", ["connector=identity"], "features of the tower are 32 wide and embeddings .* 64"),
        ("siglip", "phi", [], r"PhiForCausalLM computes its logits otherwise .*\(a bias, a scale or a cap\)"),
        ("siglip", "qwen", ["feature_layer=-3"], "feature_layer is -3, and the tower in .* has 2 layers"),
        ("qwen", "qwen", [], "a model of the type qwen2: its features are not known here"),
        ("siglip", "qwen", ["conector=mlp"], "unknown key conector. Did you mean 'connector'"),
        ("siglip", "nothing", [], "language_model is .*: there is no config.json in it"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(
    parts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tower: str,
    language: str,
    more: list[str],
    says: str,
) -> None:
    assert composed(parts, tmp_path / "vlm", tower, language, *more) == 2
    error = capsys.readouterr().err
    assert re.search(says, error), error
    assert not (tmp_path / "vlm").exists()
