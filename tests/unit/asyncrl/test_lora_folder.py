"""An adapter as a PEFT folder: what PEFT and vLLM make of it, merging, and the commands that take one."""

from __future__ import annotations

import hashlib
import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from asyncrl.cli import main
from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.model_files.folder import base_fingerprint
from asyncrl.models.loading import load_model
from asyncrl.models.lora import ADAPTER_WEIGHTS, load_policy, merge, read_adapter, write_adapter_folder
from asyncrl.models.published import load_published, published_tensors
from asyncrl.processing.processor import PromptProcessor
from protocol.messages import ChatMessage, ImagePart, Prompt, TextPart
from tests.rigs.adapters import CPU, MakeConfig, Weights, lora_config, made_up_adapter, merged, spec_of
from tests.rigs.policies import fresh_logits

pytestmark = pytest.mark.usefixtures("one_thread")


def write(config: RunConfig, adapter: Weights, folder: Path) -> Path:
    base = base_fingerprint(config.model)
    write_adapter_folder(folder, spec_of(config), adapter.items(), base=base, base_path=config.model.path)
    return folder


def on_other_weights(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration on a copy of its base, in `folder`, with other weights."""
    shutil.copytree(config.model.path, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] += 1e-3
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})


@pytest.fixture
def prompt_and_blobs() -> tuple[Prompt, dict[str, bytes]]:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(3).integers(0, 256, (28, 56, 3), np.uint8)).save(buffer, "PNG")
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    message = ChatMessage(role="user", content=(ImagePart(), TextPart(text="What is the sum of the digits?")))
    return Prompt(row_id="one", messages=(message,), image_hashes=(digest,)), {digest: buffer.getvalue()}


def logits(model: Any, config: RunConfig, prompt_and_blobs: tuple[Prompt, dict[str, bytes]]) -> torch.Tensor:
    prompt, blobs = prompt_and_blobs
    return fresh_logits(model, PromptProcessor(config.model).encode(prompt, blobs), [5, 6, 7, 8])


@pytest.mark.parametrize("lora", [{}, {"vision_tower": True}, {"modules_to_save": ["connector"]}], ids=str)
def test_peft_loads_it_on_the_base_and_merging_changes_nothing(
    make_config: MakeConfig, tmp_path: Path, prompt_and_blobs: tuple[Prompt, dict[str, bytes]], lora: dict[str, Any]
) -> None:
    from peft import PeftModel, get_peft_model_state_dict

    config = lora_config(make_config, {"alpha": 5, **lora})
    adapter = made_up_adapter(config, 1)
    folder = write(config, adapter, tmp_path / "adapter")
    expected: Any = load_model(make_config().model, device=CPU)
    load_published(expected, merged(config, adapter).items())
    own = logits(expected, config, prompt_and_blobs)

    with_peft = PeftModel.from_pretrained(load_model(config.model, device=CPU), folder)  # type: ignore[arg-type]
    assert (logits(with_peft, config, prompt_and_blobs) - own).abs().max() < 1e-4
    assert get_peft_model_state_dict(with_peft).keys() == adapter.keys(), "PEFT's own layout"
    one = merge(load_policy(config.model, folder))
    assert (logits(one, config, prompt_and_blobs) - own).abs().max() < 1e-4
    assert dict(published_tensors(one)).keys() == dict(published_tensors(expected)).keys(), "nothing is left of it"
    again = read_adapter(folder)
    assert list(again) == sorted(adapter)
    assert all(torch.equal(again[name], adapter[name]) for name in adapter)


def test_an_adapter_for_another_base_is_refused_before_loading(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = lora_config(make_config)
    folder = write(config, made_up_adapter(config, 1), tmp_path / "adapter")
    config = on_other_weights(config, tmp_path / "other")
    monkeypatch.setattr("asyncrl.models.lora.load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(UserError, match=r"was trained on other base weights .* Set model.path to"):
        load_policy(config.model, folder)


def test_an_adapter_whose_base_nobody_can_compare_is_taken_with_a_warning(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As PEFT itself saves it: without the fingerprint, with a name."""
    config, folder = lora_config(make_config), tmp_path / "adapter"
    write_adapter_folder(folder, spec_of(config), made_up_adapter(config, 1).items(), base_path="some/base")
    load_policy(config.model, folder)
    assert f"says that it is for some/base, and model.path is {config.model.path}" in caplog.text


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (".layers.0.", ".layers.7.", r"has a layer .*\.layers\.7\.\S+, \d+ wide, and here there is none"),
        ("", "", r"has a layer model\.\S+, \d+ wide, and here it is \d+ wide. Set model.path to the model that it"),
    ],
)
def test_an_adapter_of_other_layers_is_refused_whoever_made_it(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, said: str
) -> None:
    """Without our metadata nothing says for which base it is, and PEFT only warns of layers that are not there."""
    config = lora_config(make_config)
    folder = write(config, made_up_adapter(config, 1), tmp_path / "adapter")
    load_policy(config.model, folder)
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    if old:
        changed = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    else:  # twice as wide
        changed = {name: torch.cat([t, t], 1 if "lora_A" in name else 0) for name, t in tensors.items()}
    save_file(changed, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    monkeypatch.setattr("asyncrl.models.lora.load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(UserError, match=said):
        load_policy(config.model, folder)


def test_an_adapter_folder_as_model_path_is_refused_with_the_fix(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = lora_config(make_config)
    folder = write(config, made_up_adapter(config, 1), tmp_path / "adapter")
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert main(["learn", str(file), f"model.path={folder}"]) == 2
    assert "asyncrl export RUN TARGET --merged" in capsys.readouterr().err
