"""The check of a model's family at the start: groups are packed where that is exact, rows are alone elsewhere, or the
family is refused by what was found."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError
from asyncrl.models import output_head, small_copy
from asyncrl.models.small_copy import family_of
from asyncrl.processing.encoded_prompt import EncodedPrompt
from learner.training import packing_check
from learner.training.engine import TorchEngine
from learner.training.packing import PackedTrajectory, Segment, TrainGroup, build_micro_batch, unpacked
from learner.training.packing_check import packing_obstacle
from rollout_server.engines.hf.decode_check import check_decoding
from tests.rigs.family_matrix import KINDS, examine

pytestmark = pytest.mark.usefixtures("one_thread")
SIZE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 128,
}
PACKED = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "granite": {"logits_scaling": 8.0},
    "cohere": {},
    "stablelm": {},
    "gpt_oss": {},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "jamba": {},
    "mamba2": {},
}
"""Recurrences and convolutions pass each row from its beginning."""
ALONE = {
    "gemma2": (r"takes softcap", {}),
    "doge": (r"takes attention_mask", {}),
    "bloom": (r"differ by \d", {}),
    "falcon": (r"KeyError: 'asyncrl_shared_prefix'", {}),
}
NOT_SAMPLED = {
    "mamba2": "family mamba2 fails in a batch",
    "jamba": "family jamba fails",
    "lfm2": "family lfm2 fails",
    "doge": "family doge in a batch",
}
"""Families that the hf engine cannot sample from: states that it has no room for, a mask that looks at padding."""


def folder_of(family: str, folder: Path, **settings: Any) -> ModelConfig:
    """A folder with nothing but a configuration of the family's published size, but for `settings`."""
    transformers.CONFIG_MAPPING[family](**settings).save_pretrained(folder)
    return ModelConfig(path=str(folder))


UNGROUPED = {"falcon"}
"""Families that decode with transformers' own attention: their code looks at its name."""


@pytest.mark.parametrize("family", PACKED)
def test_groups_of_plain_attention_are_packed(family: str, tmp_path: Path) -> None:
    config = folder_of(family, tmp_path, **PACKED[family])
    assert packing_obstacle(config) == ""
    check_engine(family, config)


@pytest.mark.parametrize("family", ALONE)
def test_what_packed_groups_have_not_is_found_and_rows_are_alone(family: str, tmp_path: Path) -> None:
    said, settings = ALONE[family]
    config = folder_of(family, tmp_path, **settings)
    found = packing_obstacle(config)
    assert re.search(said, found), found
    check_engine(family, config)


def check_engine(family: str, config: ModelConfig) -> None:
    if family in NOT_SAMPLED:
        with pytest.raises(UserError, match=NOT_SAMPLED[family]):
            check_decoding(config)
    else:
        assert check_decoding(config) is (family not in UNGROUPED)


@pytest.mark.parametrize(("layers", "act"), [(4, "silu"), (8, "relu")])
def test_a_small_copy_keeps_words_as_long_as_its_layers_are_many(layers: int, act: str, tmp_path: Path) -> None:
    """`silu` has four letters, and `bfloat16` eight."""
    sizes = {**SIZE, "num_hidden_layers": layers, "hidden_act": act, "dtype": "bfloat16"}
    described = family_of(folder_of("llama", tmp_path, **sizes)).described
    assert described.hidden_act == act
    assert described.num_hidden_layers == min(layers, 5)


def test_a_family_with_another_head_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = folder_of("llama", tmp_path, **SIZE)
    scaled = packing_check.scaled_logits
    monkeypatch.setattr(packing_check, "scaled_logits", lambda *given: 2 * scaled(*given))
    monkeypatch.setattr(packing_check, "_faults", packing_check._faults.__wrapped__)  # others have found them before
    with pytest.raises(UserError, match=r"family llama, .*one at a time, log-probs differ by \d"):
        packing_obstacle(config)


def test_a_family_without_a_copy_is_computed_row_by_row_as_its_own_pass(
    make_config: Callable[..., RunConfig], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known of its packed groups and of its decoding; what the learner computes is compared with the loaded
    model itself."""
    monkeypatch.setattr(small_copy, "_FAMILIES", {})
    monkeypatch.setattr(small_copy, "MOST_PARAMETERS", 0)
    config = make_config()
    engine = TorchEngine(config.model_settings, config.learner.optim, 1)
    engine.prepare()
    assert re.search(r"no small copy of its family qwen2_vl .* have [\d,]+ parameters", engine.obstacle)
    with pytest.raises(UserError, match=r"cannot sample .*no small copy .*Set rollout.engine=vllm"):
        check_decoding(config.model)
    monkeypatch.setattr(packing_check, "scaled_logits", lambda *given: 2 * output_head.scaled_logits(*given))
    with pytest.raises(UserError, match=r"differ by [\d.]+ nats from those of its own forward pass, and no small copy"):
        engine.prepare()


def test_a_routers_noise_is_refused_by_its_key(tmp_path: Path) -> None:
    config = folder_of("phimoe", tmp_path)
    with pytest.raises(UserError, match=r"noise \(router_jitter_noise=0.01\).* Set it to 0"):
        packing_obstacle(config)


@pytest.mark.parametrize(
    ("kind", "trains", "samples"),
    [
        ("llama", "packed", "hf"),
        ("mistral (window 6)", "packed", "hf"),
        ("gpt_oss", "packed", "hf"),
        ("gemma2", "alone", "hf"),
        ("llama4_text", "alone", "hf"),
        ("lfm2 (convolutions)", "packed", "refused"),
        ("qwen3_next", "packed", "refused"),
        ("phi3 (longrope over 16 tokens)", "refused", ""),
        ("doge", "alone", "refused"),
    ],
)
def test_what_is_accepted_is_the_models_own(kind: str, trains: str, samples: str, tmp_path: Path) -> None:
    """Log-probs and gradients of the learner, and log-probs of what the hf engine samples, against plain passes."""
    assert kind in KINDS or "(" not in kind
    found = examine(kind, tmp_path)
    assert (found.trains, found.samples) == (trains, samples), found


def test_rows_that_must_be_alone_are_never_computed_together(tmp_path: Path) -> None:
    """Two completions of one micro-batch, and two segments of a trajectory."""
    model = family_of(folder_of("llama", tmp_path, **SIZE)).model(None)
    ids = np.arange(5, 9, dtype=np.int32)
    row = PackedTrajectory(0, ids, np.ones(4, bool))
    for rows in ((row, replace(row, row=1)), (replace(row, segments=(Segment(), Segment(2))),)):
        together = build_micro_batch(model, [TrainGroup(EncodedPrompt.of_text(ids), rows)], torch.device("cpu"))
        with pytest.raises(
            UserError, match=r"computes each row alone, and .* has several: [12] completions of 2 segments"
        ):
            unpacked(together)
    alone = build_micro_batch(model, [TrainGroup(EncodedPrompt.of_text(ids), (row,))], torch.device("cpu"))
    assert sorted(unpacked(alone)) == ["input_ids"]
