"""The end product of a run whose base has 4 bits: an adapter that says so, or a merge into the dequantised base."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.cli import main
from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from asyncrl.data.prompts import PromptRenderer, RenderedPrompt
from asyncrl.model_files.folder import base_fingerprint
from asyncrl.models.loading import load_model
from asyncrl.models.lora import load_policy, write_adapter_folder
from asyncrl.models.published import published_tensors
from asyncrl.processing.processor import PromptProcessor
from asyncrl.run_folder.export_record import read_record
from asyncrl.telemetry.recorder import CONFIG_FILE
from asyncrl_plugins.quantization.nf4 import base_layers, dequantized
from learner.loop.policy_export import finish_export
from tests.rigs.adapters import CPU, made_up_adapter, spec_of
from tests.rigs.policies import initial_weights

pytestmark = [
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
    pytest.mark.usefixtures("one_thread"),
]
MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def config(make_config: MakeConfig) -> RunConfig:
    return make_config(model={"lora": {"rank": 4}, "quantization": "nf4"})


@pytest.fixture
def folder(config: RunConfig, tmp_path: Path) -> Path:
    """An adapter as a run writes it."""
    base = base_fingerprint(config.model)
    adapter = made_up_adapter(config, 1).items()
    write_adapter_folder(tmp_path / "export", spec_of(config), adapter, base=base, base_path=config.model.path)
    return tmp_path / "export"


def shown(config: RunConfig) -> list[RenderedPrompt]:
    renderer = PromptRenderer(config.data)
    return [renderer.render({"prompt": f"What is {i}?", "answer": "1"}, f"{i}") for i in range(8)]


def finished(config: RunConfig, folder: Path, sampled: str, **form: bool) -> Any:
    return finish_export(config.model, sampled, PromptProcessor(config.model), lambda: shown(config), folder, **form)


def test_it_is_an_adapter_and_transformers_makes_its_base_as_the_readme_says(config: RunConfig, folder: Path) -> None:
    record = finished(config, folder, "nf4")
    assert (record.form, record.logprob_gap) == ("adapter", None)
    assert record.describe() == f"the policy's adapter, for {config.model.path} rounded to nf4 in float32"
    readme = (folder / "README.md").read_text()
    assert f"`{base_fingerprint(config.model)}`" in readme
    found = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert found
    names: dict[str, Any] = {}
    exec(found[1].replace("THIS_FOLDER", str(folder)), names)
    theirs, ours = names["policy"], load_policy(config.model, folder, "nf4")
    quantised = {name for name, p in theirs.get_base_model().named_parameters() if p.dtype == torch.uint8}
    layers = {name.replace("_proj", "_proj.base_layer") for name in base_layers(load_model(config.model, device=CPU))}
    assert {name.removesuffix(".weight") for name in quantised} == layers
    ids = {"input_ids": torch.arange(5, 25)[None]}
    with torch.no_grad():
        difference = theirs.train()(**ids).logits - ours.eval()(**ids).logits
    assert difference.abs().max() < 1e-4


def test_a_merge_is_into_the_dequantised_base_and_its_gap_is_said(
    config: RunConfig, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step-000003").mkdir(parents=True)
    adapter = load_file(folder / "adapter_model.safetensors")
    folder.rename(run / "checkpoints" / "step-000003" / "adapter")
    (run / CONFIG_FILE).write_text(dump_config(config))
    assert main(["export", str(run), str(tmp_path / "merged"), "--merged"]) == 0
    assert f"merged into {config.model.path} rounded to nf4 in float32; log-prob gap" in " ".join(
        capsys.readouterr().out.split()
    )
    record = json.loads((tmp_path / "merged" / "asyncrl_export.json").read_text())
    assert record["form"] == "merged"
    assert record["logprob_gap"] < 1e-4
    assert record["tokens"] > 50
    assert not (tmp_path / "merged" / "README.md").exists()
    base, spec = initial_weights(config), spec_of(config)
    merged = dict(published_tensors(load_policy(config.model, tmp_path / "merged")))
    for layer in spec.target_modules:
        a, b = (adapter[f"base_model.model.{layer}.lora_{side}.weight"] for side in "AB")
        expected = dequantized(base[f"{layer}.weight"]) + spec.alpha / spec.rank * (b @ a)
        torch.testing.assert_close(merged[f"{layer}.weight"], expected, rtol=1e-5, atol=1e-6)


def test_an_adapter_that_another_engine_sampled_on_a_plain_base_differs_from_the_policy(
    config: RunConfig, folder: Path
) -> None:
    record = finished(config, folder, "")
    assert read_record(folder) == record
    assert (record.form, record.quantization) == ("adapter", "float32")
    assert record.logprob_gap is not None
    assert 1e-3 < record.logprob_gap < 1
    said = replace(record, logprob_gap=0.02).describe()
    assert "DIFFERS FROM THE POLICY. It was sampled with float32 weights: serve it with such" in said
