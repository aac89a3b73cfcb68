"""Scores of adapters are those of the policy that was sampled, whatever dtype its base has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.cli import main
from asyncrl.errors import UserError
from asyncrl.models.loading import load_model
from asyncrl.models.lora import add_adapter, write_adapter_folder
from asyncrl.models.published import load_published, published_tensors
from asyncrl_plugins.evaluation import plain_scores
from tests.rigs.adapters import CPU, MakeConfig, lora_config, made_up_adapter, spec_of
from tests.unit.asyncrl.test_lora_folder import on_other_weights, write
from tests.unit.asyncrl.test_policy_export import DTYPES, configured, make_run, small_adapter

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_adapter_is_scored_beside_its_base(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    config = configured(make_config, dtype)
    adapter, folder = small_adapter(config), tmp_path / "adapter"
    write_adapter_folder(folder, spec_of(config), adapter.items(), base_path=config.model.path)
    sampled: Any = load_model(config.model, device=CPU)
    add_adapter(sampled, spec_of(config))
    load_published(sampled, adapter.items())
    seen: list[dict[str, torch.Tensor]] = []

    def generate(model: Any, processor: Any, rows: list[Any], *_: Any) -> list[tuple[str, bool, int]]:
        whole = model.get_base_model()
        base = {name: tensor for name, tensor in whole.named_parameters() if "lora_" not in name}
        seen.append({**dict(published_tensors(whole)), **base})
        return [("7", True, 1)] * len(rows)

    monkeypatch.setattr(plain_scores, "_generate", generate)
    plain_scores.evaluate(config, folder)
    engine = {**dict(published_tensors(sampled)), **dict(sampled.named_parameters())}
    for name, tensor in seen[0].items():
        assert torch.equal(tensor, engine[name]), name
        assert tensor.dtype == engine[name].dtype, name
    assert set(adapter) <= seen[0].keys(), "it was merged"


def test_a_merged_export_is_scored_in_its_own_dtype(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, run = configured(make_config, "bfloat16"), tmp_path / "run in bfloat16"
    make_run(config, run)
    assert main(["export", str(run), str(tmp_path / "merged"), "--merged"]) == 0
    dtypes: list[torch.dtype] = []

    def generate(model: Any, processor: Any, rows: list[Any], *_: Any) -> list[tuple[str, bool, int]]:
        dtypes.append(model.dtype)
        return [("7", True, 1)] * len(rows)

    monkeypatch.setattr(plain_scores, "_generate", generate)
    plain_scores.evaluate(config, tmp_path / "merged")
    assert set(dtypes) == {torch.float32}
    load_model(config.model.model_copy(update={"path": str(tmp_path / "merged")}), device=CPU)
    assert "is rounded to model.dtype=bfloat16" in caplog.text


def test_an_adapter_for_another_base_is_refused_before_loading(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = lora_config(make_config)
    folder = write(config, made_up_adapter(config, 1), tmp_path / "adapter")
    config = on_other_weights(config, tmp_path / "other")
    monkeypatch.setattr("asyncrl.models.lora.load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(UserError, match=r"was trained on other base weights .* Set model.path to"):
        plain_scores.evaluate(config, folder)
