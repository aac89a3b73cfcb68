"""An output layer that shares its weight with the embedding: vLLM keeps a packed copy, which an update must reach."""

from __future__ import annotations

import json
from pathlib import Path

from tests.rigs.policies import initial_weights, moved
from tests.rigs.tiny import make_tiny_model
from tests.rigs.vllm_rig import FP32, NEEDS_VLLM, Rig, gap_to, vllm_config

pytestmark = NEEDS_VLLM


def make_tied_model(folder: Path) -> Path:
    from transformers import AutoModelForImageTextToText

    make_tiny_model(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    file.write_text(json.dumps(config))
    model = AutoModelForImageTextToText.from_pretrained(folder)
    model.lm_head.weight = model.get_input_embeddings().weight  # what was saved is two, and so they are not tied
    model.save_pretrained(folder)
    return folder


def test_an_update_of_tied_weights_reaches_the_output_layer(tmp_path: Path, digits_data: Path) -> None:
    config = vllm_config(
        make_tied_model(tmp_path / "model"),
        digits_data,
        tmp_path / "run",
        max_response_length=64,
        rollout={"max_concurrent_sequences": 8},
    )
    weights = initial_weights(config)
    assert not [name for name in weights if "lm_head" in name]
    rig = Rig(config, weights)
    try:
        for seed in (3, 4):
            weights = moved(weights, seed)
            rig.run(rig.update(weights))
            request = rig.request("answer 1 2 3", tokens=20)
            assert gap_to(rig, weights, request, rig.sample(request)[request.request_id, 0]) < FP32
    finally:
        rig.close()
