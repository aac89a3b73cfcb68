"""Exports of adapters are the policy that was sampled, whatever dtype its base has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.cli import main
from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from asyncrl.model_files.folder import base_fingerprint
from asyncrl.models.loading import load_model
from asyncrl.models.lora import is_adapter_folder, write_adapter_folder
from asyncrl.models.published import published_tensors
from asyncrl.telemetry.recorder import CONFIG_FILE
from tests.rigs.adapters import CPU, MakeConfig, Weights, lora_config, made_up_adapter, spec_of

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = ["float32", "bfloat16", "float16"]
RECORD = "asyncrl_export.json"


def configured(make_config: MakeConfig, dtype: str, **sections: dict[str, Any]) -> RunConfig:
    config = lora_config(make_config, **sections)
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def small_adapter(config: RunConfig) -> Weights:
    """Tensors whose update is far below a step of a 16-bit weight, as those of real runs are."""
    return {name: 0.02 * tensor for name, tensor in made_up_adapter(config, 1).items()}


def make_run(config: RunConfig, run: Path) -> Weights:
    """Make a run directory that has one checkpoint, of such an adapter."""
    tensors, folder = small_adapter(config), run / "checkpoints" / "step-000003" / "adapter"
    base = base_fingerprint(config.model)
    write_adapter_folder(folder, spec_of(config), tensors.items(), base=base, base_path=config.model.path)
    (run / CONFIG_FILE).write_text(dump_config(config))
    return tensors


@pytest.fixture
def run_of(make_config: MakeConfig, tmp_path: Path) -> Any:
    """Makes the configuration, directory and adapter of a run in a dtype."""

    def make(dtype: str) -> tuple[RunConfig, Path, Weights]:
        config, run = configured(make_config, dtype), tmp_path / f"run in {dtype}"
        return config, run, make_run(config, run)

    return make


def update_of(config: RunConfig, adapter: Weights, layer: str) -> torch.Tensor:
    a, b = (adapter[f"base_model.model.{layer}.lora_{x}.weight"] for x in "AB")
    return spec_of(config).alpha / spec_of(config).rank * (b @ a)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_form_of_an_export_keeps_the_policy(run_of: Any, tmp_path: Path, dtype: str) -> None:
    _, run, adapter = run_of(dtype)
    assert main(["export", str(run), str(tmp_path / "export")]) == 0
    record = json.loads((tmp_path / "export" / RECORD).read_text())
    if dtype == "float32":
        assert not is_adapter_folder(tmp_path / "export")
        assert record["form"] == "merged"
        assert record["logprob_gap"] < 1e-4
        assert record["tokens"] > 50
    else:
        written = load_file(tmp_path / "export" / "adapter_model.safetensors")
        assert all(torch.equal(written[name], tensor) for name, tensor in adapter.items())
        assert (record["form"], record["policy_dtype"], record["logprob_gap"]) == ("adapter", dtype, None)
        assert (tmp_path / "export" / "tokenizer.json").is_file()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_merge_keeps_all_of_the_update_in_float32(run_of: Any, tmp_path: Path, dtype: str) -> None:
    config, run, adapter = run_of(dtype)
    assert main(["export", str(run), str(tmp_path / "merged"), "--merged"]) == 0
    whole = {"path": str(tmp_path / "merged"), "dtype": "float32"}
    merged = dict(published_tensors(load_model(config.model.model_copy(update=whole), device=CPU)))
    base = dict(published_tensors(load_model(config.model, device=CPU)))
    for layer in spec_of(config).target_modules:
        weight = merged[f"{layer}.weight"]
        change = weight.double() - base[f"{layer}.weight"].double()
        torch.testing.assert_close(change, update_of(config, adapter, layer).double(), rtol=1e-3, atol=1e-7)
    described = json.loads((tmp_path / "merged" / "config.json").read_text())
    parts = [described, *(part for part in described.values() if isinstance(part, dict) and "dtype" in part)]
    assert {part["dtype"] for part in parts} == {"float32"}


def test_a_merge_that_is_not_the_policy_is_labelled_with_the_ways_out(
    run_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run, _ = run_of("bfloat16")
    monkeypatch.setattr("asyncrl.run_folder.export_record.LARGEST_GAP", 1e-6)
    assert main(["export", str(run), str(tmp_path / "merged"), "--merged"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "DIFFERS FROM THE POLICY" in said
    assert "--adapter) on its base in bfloat16, or train with model.dtype=float32" in said


def test_a_run_without_checkpoints_exports_its_adapter_merged(run_of: Any, tmp_path: Path) -> None:
    """As a supervised one, whose export is an adapter that the next run cannot begin with."""
    _, run, _ = run_of("bfloat16")
    (run / "checkpoints" / "step-000003" / "adapter").rename(run / "export")
    (run / "checkpoints" / "step-000003").rmdir()
    assert main(["export", str(run), str(tmp_path / "merged"), "--merged"]) == 0
    assert (tmp_path / "merged" / "model.safetensors").is_file()
