"""Settings that a trained model's folder takes over can be written, which is known before the first step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError
from asyncrl.models.export import check_export, export_model
from asyncrl.models.generation_settings import generation_config
from asyncrl.models.loading import load_model
from asyncrl.processing.processor import PromptProcessor
from tests.rigs import chat_templates as templates
from tests.rigs.chat_templates import text_processor


def with_generation(model: Path, folder: Path, settings: dict[str, Any]) -> ModelConfig:
    """A copy of the model folder whose generation_config.json is this."""
    shutil.copytree(model, folder)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return ModelConfig(path=str(folder), dtype="float32")


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"temperature": 0.9, "top_p": 0.6}, {"do_sample": True, "temperature": 0.9, "top_p": 0.6}),
        ({"top_k": 20}, {"do_sample": True, "top_k": 20}),
        ({"min_p": 0.1, "typical_p": 0.9}, {"do_sample": True, "min_p": 0.1, "typical_p": 0.9}),
        ({"do_sample": False, "temperature": 0.1}, {"do_sample": False}),
        ({"length_penalty": 0.5}, {}),
        ({"output_scores": True, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"early_stopping": True, "temperature": 0.9}, {"do_sample": True, "temperature": 0.9}),
    ],
)
def test_settings_that_transformers_reads_and_does_not_write_are_corrected_in_the_export(
    tiny_model: Path, tmp_path: Path, settings: dict[str, Any], kept: dict[str, Any]
) -> None:
    config = with_generation(tiny_model, tmp_path / "model", settings)
    generation_config(config)
    model = load_model(config, device=torch.device("cpu"))
    export_model(model, PromptProcessor(config).processor, tmp_path / "export")
    written = json.loads((tmp_path / "export" / "generation_config.json").read_text())
    assert {name: value for name, value in written.items() if name in {*settings, *kept}} == kept
    assert json.loads((tmp_path / "model" / "generation_config.json").read_text()) == settings, "the file stays"


@pytest.mark.parametrize(
    "settings", [{"num_return_sequences": 4}, {"max_new_tokens": 0}, {"cache_implementation": "none such"}]
)
def test_settings_that_cannot_be_saved_in_any_way_are_refused_at_the_start(
    tiny_model: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = with_generation(tiny_model, tmp_path / "model", settings)
    for use in (generation_config, lambda config: load_model(config, device=torch.device("cpu"))):
        with pytest.raises(UserError, match=rf"generation_config.json in {tmp_path}/model .*{next(iter(settings))}"):
            use(config)


class _Unwritable:
    def save_pretrained(self, folder: str) -> None:
        raise TypeError("Object of type set is not JSON serializable")


def test_other_parts_that_cannot_be_saved_are_found_by_saving_them(tiny_model: Path) -> None:
    model = load_model(ModelConfig(path=str(tiny_model), dtype="float32"), device=torch.device("cpu"))
    check_export(model, PromptProcessor(ModelConfig(path=str(tiny_model))).processor)
    with pytest.raises(UserError, match=r"_Unwritable of the model folder is refused .*not JSON"):
        check_export(model, _Unwritable())


def test_an_export_names_the_end_of_turn_by_which_its_completions_ended(tiny_model: Path, tmp_path: Path) -> None:
    """A base model with a template: `<|im_end|>` closes a turn, and its files name `<|endoftext|>` alone."""
    config = with_generation(tiny_model, tmp_path / "model", {})
    processor = PromptProcessor(config)
    end, other = processor.tokenizer.eos_token_id, processor.tokenizer.pad_token_id
    processor.tokenizer.eos_token = "<|endoftext|>"
    model: Any = load_model(config, device=torch.device("cpu"))
    model.generation_config = GenerationConfig(eos_token_id=other)
    export_model(model, processor.processor, tmp_path / "export")
    assert GenerationConfig.from_pretrained(tmp_path / "export").eos_token_id == [other, end]


@pytest.mark.parametrize("named", ["Gemma3Processor", "PixtralProcessor", "Qwen2_5_VLProcessor", "NoSuchProcessor"])
def test_a_text_model_needs_no_processor_that_its_tokenizer_names(tmp_path: Path, named: str) -> None:
    """Gemma 3's 1b and 270m are published so, without an image processor's files."""
    processor = text_processor(tmp_path / "model", templates.GEMMA, "<eos>", processor_class=named)
    assert not processor.sees_images
    message = {"role": "user", "content": [{"type": "text", "text": "7"}]}
    assert processor.render_messages([message]).endswith("<start_of_turn>user\n7<end_of_turn>\n<start_of_turn>model\n")


def test_dry_run_refuses_what_training_could_not_save(
    make_config: Callable[..., RunConfig], tiny_model: Path, tmp_path: Path
) -> None:
    from asyncrl.checks.prompt_rows import preview_rows

    config = with_generation(tiny_model, tmp_path / "model", {"num_return_sequences": 4})
    with pytest.raises(UserError, match="a trained model could not be saved with it"):
        preview_rows(make_config(model={"path": config.path}))
