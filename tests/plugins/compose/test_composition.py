"""Parts composed into a vision-language model: their weights, its words, and what does not go together."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from asyncrl.cli import main as asyncrl
from asyncrl.config.sections import ModelConfig
from asyncrl.models.loading import load_model
from asyncrl.processing.processor import PromptProcessor
from tests.plugins.compose.tiny_composed import COMPOSED, WIDTH, compose, parts
from tests.unit.asyncrl.test_measured_prompts import picture, prompt_of

__all__ = ["parts"]
ELSEWHERE = """
import sys
sys.modules["asyncrl"] = sys.modules["asyncrl_plugins"] = None
import torch
from transformers import AutoModelForImageTextToText
for kind, (ids, pixels, said) in torch.load("said.pt").items():
    model = AutoModelForImageTextToText.from_pretrained(kind, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules.")
    torch.testing.assert_close(model(input_ids=ids, pixel_values=pixels).logits, said, atol=1e-5, rtol=1e-5)
"""
"""A program that loads folders with transformers alone, and makes the same logits of the same prompts."""


def composed(parts: Path, target: Path, tower: str, language: str, *more: str) -> int:
    return compose(parts, target, f"vision_tower={tower}", f"language_model={language}", *more)


@pytest.mark.parametrize("connector", ["mlp", "qformer"])
def test_a_trained_connector_is_taken_from_a_file_or_a_composed_folder(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], connector: str
) -> None:
    settings = [f"connector={connector}", *(["queries=4"] if connector == "qformer" else [])]

    def weights(target: Path) -> dict[str, torch.Tensor]:
        loaded = load_file(target / "model.safetensors")
        return {name: value for name, value in loaded.items() if "multi_modal_projector." in name}

    assert composed(parts, tmp_path / "first", "siglip", "qwen2", *settings, "seed=7") == 0
    trained = weights(tmp_path / "first")
    file = tmp_path / "connector.safetensors"
    save_file({name.partition("multi_modal_projector.")[2]: value for name, value in trained.items()}, file)
    for number, source in enumerate([tmp_path / "first", file]):
        target = tmp_path / str(number)
        assert composed(parts, target, "siglip", "qwen2", *settings, f"connector_weights={source}") == 0
        torch.testing.assert_close(weights(target), trained, atol=0, rtol=0)
    capsys.readouterr()
    assert (
        composed(parts, tmp_path / "other", "siglip", "qwen2", "connector=resampler", f"connector_weights={file}") == 2
    )
    assert "in the connector that the parts need" in capsys.readouterr().err
    assert composed(parts, tmp_path / "other", "siglip", "qwen2", "connector_weights=nowhere") == 2
    assert "where no safetensors file is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tower", "language", "connector"),
    [("siglip", "qwen2", "mlp"), ("clip", "wide", "linear"), ("dinov2", "qwen2", "identity")],
)
def test_parts_keep_their_weights_and_read_images(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tower: str, language: str, connector: str
) -> None:
    target = tmp_path / "vlm"
    assert composed(parts, target, tower, language, f"connector={connector}", "feature_layer=-1") == 0
    assert "rollout.engine  hf" in capsys.readouterr().out
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
    assert encoded.media_tokens == (4 if tower == "dinov2" else 16)
    loaded: Any = load_model(ModelConfig(path=str(target), dtype="float32"), device=torch.device("cpu"))
    logits = loaded(
        input_ids=torch.from_numpy(encoded.token_ids).long()[None], pixel_values=encoded.pixel_values
    ).logits
    assert logits.isfinite().all()


def test_a_connector_is_its_seeds(parts: Path, tmp_path: Path) -> None:
    settings = tmp_path / "parts.yaml"
    settings.write_text(f"vision_tower: {parts / 'siglip'}\nlanguage_model: {parts / 'qwen2'}\nseed: 1\n")
    connectors = []
    for number, more in enumerate(([], [], ["seed=2"])):
        assert asyncrl(["compose", str(tmp_path / str(number)), str(settings), *more]) == 0
        model: Any = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / str(number))
        connectors.append(model.model.multi_modal_projector.linear_1.weight)
    assert torch.equal(connectors[0], connectors[1])
    assert not torch.equal(connectors[0], connectors[2])


@pytest.mark.parametrize("language", ["qwen2", "qwen3", "llama", "phi", "gemma", "stablelm"])
def test_a_composed_model_writes_what_its_language_model_writes(parts: Path, tmp_path: Path, language: str) -> None:
    assert composed(parts, tmp_path / "vlm", "siglip", language) == 0
    model: Any = load_model(ModelConfig(path=str(tmp_path / "vlm"), dtype="float32"), device=torch.device("cpu"))
    alone: Any = transformers.AutoModelForCausalLM.from_pretrained(parts / language)
    ids = torch.arange(20, 32)[None]
    said = [each(ids).logits for each in (model, alone)]
    known = said[1].shape[-1]  # the placeholder's row is new
    torch.testing.assert_close(said[0][..., :known], said[1], atol=1e-5, rtol=1e-5)
    model.lm_head.weight.data[known:] = 0
    written = [each.generate(ids, max_new_tokens=6, do_sample=False) for each in (model, alone)]
    assert torch.equal(*written)
    assert written[0].shape[1] > 13


def test_what_llava_cannot_hold_is_loaded_where_asyncrl_is_not_installed(parts: Path, tmp_path: Path) -> None:
    said = {}
    for kind, words in COMPOSED.items():
        target = tmp_path / kind
        assert composed(parts, target, "siglip", "qwen2", *words) == 0
        model: Any = load_model(ModelConfig(path=str(target), dtype="float32"), device=torch.device("cpu"))
        encoded = PromptProcessor(ModelConfig(path=str(target))).encode(*prompt_of(picture(60, 30)))
        assert encoded.media_tokens == {"resampler": 5, "qformer": 5, "tokens": 16 + 4}.get(kind, 16)
        ids, pixels = torch.from_numpy(encoded.token_ids).long()[None], encoded.pixel_values
        assert pixels is not None
        logits, black = (model(input_ids=ids, pixel_values=each).logits for each in (pixels, 0 * pixels))
        assert not torch.allclose(logits[:, -1], black[:, -1], atol=1e-6)
        said[kind] = (ids, pixels, logits)
    torch.save(said, tmp_path / "said.pt")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", ELSEWHERE], cwd=tmp_path, env=environment, check=True)


@pytest.mark.parametrize(
    ("tower", "language", "more", "says"),
    [
        ("siglip", "wide", ["connector=identity"], "features of the tower are 32 wide and embeddings .* 64"),
        ("siglip", "capped", [], r"Gemma2ForCausalLM computes its logits otherwise .*\(a scale or a cap\)"),
        ("siglip", "qwen2", ["queries=8"], "queries would do nothing: queries and connector_layers are of"),
        ("siglip", "qwen2", ["mix=tokens"], "mix would do nothing: .* mix is of two towers"),
        ("clip", "qwen2", ["second_vision_tower=qwen2"], "second_vision_tower is .*, a model of the type qwen2"),
        ("siglip", "qwen2", ["feature_layer=-3"], "feature_layer is -3, and the tower in .* has 2 layers"),
        ("qwen2", "qwen2", [], "a model of the type qwen2: its features are not known here"),
        ("siglip", "qwen2", ["conector=mlp"], "unknown key conector. Did you mean 'connector'"),
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
