"""Scores are those of the model that is trained: with all that its attention has, and within its rotary frequencies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.models.lora import write_adapter_folder
from asyncrl_plugins.evaluation import plain_scores
from tests.rigs.adapters import Weights, lora_config, made_up_adapter, merged, spec_of
from tests.rigs.family_matrix import make_folder

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.arange(20, 44)[None]


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 2 folder, whose scores of attention are capped, which PyTorch's attention does not do."""
    return make_folder("gemma2", tmp_path_factory.mktemp("gemma2"))


@pytest.mark.parametrize("form", ["model", "adapter"])
def test_caps_on_scores_are_computed_where_a_model_is_scored(
    make_config: Callable[..., RunConfig], capped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """`evaluate` completes rows with a model, or with an adapter beside it, whose logits are eager attention's."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "3 + 4", "answer": "7"}\n')
    data = {"val_files": [str(rows)], "max_prompt_length": 64}
    config = lora_config(partial(_with_model, make_config, str(capped)), data=data)
    folder, adapter = capped, Weights()
    if form == "adapter":
        adapter, folder = made_up_adapter(config, 1), tmp_path / "adapter"
        write_adapter_folder(folder, spec_of(config), adapter.items(), base_path=config.model.path)
    plain = AutoModelForCausalLM.from_pretrained(capped, dtype=torch.float32, attn_implementation="eager")
    uncapped = AutoModelForCausalLM.from_pretrained(capped, dtype=torch.float32, attn_implementation="sdpa")
    for model in (plain, uncapped):
        model.load_state_dict(merged(config, adapter) if adapter else {}, strict=False)
    found: list[torch.Tensor] = []

    def generate(model: Any, processor: Any, rows: list[Any], *_: Any) -> list[tuple[str, bool, int]]:
        found.append(model(input_ids=IDS).logits.detach())
        return [("7", True, 1)] * len(rows)

    monkeypatch.setattr(plain_scores, "_generate", generate)
    plain_scores.evaluate(config, folder)
    with torch.no_grad():
        wanted, wrong = (model(input_ids=IDS).logits for model in (plain, uncapped))
    torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-4)
    assert float((wrong - wanted).abs().max()) > 0.01, "the cap does something"


def _with_model(make_config: Callable[..., RunConfig], path: str, **sections: dict[str, Any]) -> RunConfig:
    return make_config(**{**sections, "model": {**sections.get("model", {}), "path": path}})


LONG = [1.0] * 8
CHANGING = {
    "longrope": (
        {
            "rope_type": "longrope",
            "short_factor": LONG,
            "long_factor": LONG,
            "original_max_position_embeddings": 100,
        },
        {},
        r"136 tokens .* \(longrope\) are others in rows of more than 100",
    ),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, {"max_position_embeddings": 100}, r"knows 100 positions"),
}


@pytest.mark.parametrize("kind", CHANGING)
def test_rows_beyond_a_models_rotary_frequencies_are_not_scored(
    make_config: Callable[..., RunConfig], tiny_model: Path, tmp_path: Path, kind: str
) -> None:
    rotary, sizes, said = CHANGING[kind]
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    described = json.loads((folder / "config.json").read_text())
    text = described.get("text_config", described)
    text.update(sizes, rope_parameters={**text["rope_parameters"], **rotary})
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=said):
        plain_scores.complete_held_out(make_config(), folder)
