"""The configurations in configs/, for real models: what can be known of them without the models, and without GPUs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.cli import main
from asyncrl.config.explain import explain
from asyncrl.config.load import load_config
from asyncrl.config.schema import changed
from asyncrl.devices.gpu_assignment import check_assignment
from asyncrl.memory_plan.plan import make_plan
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.spec import load_reward
from asyncrl_plugins.vllm.rules import device_problem
from tests.rigs.tiny import ROOT

FILES = {file.stem: file for file in sorted((ROOT / "configs").glob("*.yaml"))}
ON_CPU = ("smollm2_135m_grpo", "smolvlm_256m_grpo_lora")
TEXT = ("qwen3_1_7b_grpo", "qwen3_4b_grpo_lora", "smollm2_135m_grpo")
ON_GPU = [name for name in FILES if name not in ON_CPU]
QWEN2_5_VL_3B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128000,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}
"""The published config.json, as far as it decides sizes."""
GOOD = "<think>The angles of a triangle add up to 180.</think> So it is \\boxed{60}."


EIGHT_GPUS = ("0", "1", "2", "3", "4", "5", "6", "7")


def test_there_is_one_of_each_kind() -> None:
    pictures = ["qwen2_5_vl_3b_grpo", "qwen2_5_vl_3b_grpo_lora", "qwen2_5_vl_7b_grpo_fsdp2", "smolvlm_256m_grpo_lora"]
    assert sorted(FILES) == sorted([*pictures, *TEXT])
    for file in FILES.values():
        assert explain(load_config(file), num_rows=100).count("\n") > 20


@pytest.mark.parametrize("name", ON_GPU)
def test_a_starting_point_loads_and_uses_the_gpus_that_it_names(name: str) -> None:
    config = load_config(FILES[name])
    assert device_problem(config) == ""
    (stated,) = map(int, re.findall(r"^# .* GPUs? of (\d+) GB", FILES[name].read_text(), re.MULTILINE))
    if config.trainer.mode == "sync":
        assert config.learner.max_staleness == 0
    else:
        assigned = check_assignment(config, EIGHT_GPUS)
        assert not assigned.is_shared_with_learner
        assert len(assigned.learner) + len(set(assigned.servers)) == len(EIGHT_GPUS), "each process has its own"
    longest = config.data.max_prompt_length + config.batch.group_size * config.data.max_response_length
    assert config.batch.microbatch_tokens >= longest, "a group at its longest is a micro-batch"
    assert config.gpu_memory.budget_gib <= 0.96 * stated, "GB on the box, less what a driver and a desktop take"


QWEN2_5_VL_7B = {
    **QWEN2_5_VL_3B,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "vision_config": {**QWEN2_5_VL_3B["vision_config"], "out_hidden_size": 3584},
}


def test_adapters_fit_24_gb(tmp_path: Path) -> None:
    """The plan of the other takes as many seconds; a run makes its own, and refuses to begin where it does not fit."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_VL_3B))
    plan = make_plan(changed(load_config(FILES["qwen2_5_vl_3b_grpo_lora"]), {"model.path": str(tmp_path)}))
    assert plan.model.parameters == pytest.approx(3.81e9, rel=0.01)
    assert plan.budget / 2 < plan.peak < plan.budget


def test_adapters_of_7_billion_fit_24_gb_on_a_base_in_4_bits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_VL_7B))
    changes = {"model.path": str(tmp_path), "model.quantization": "nf4"}
    plan = make_plan(changed(load_config(FILES["qwen2_5_vl_3b_grpo_lora"]), changes))
    assert plan.model.parameters == pytest.approx(8.37e9, rel=0.01)
    assert plan.peak < plan.budget
    (learner,) = (phase for phase in plan.phases if phase.name == "learner awake")
    fewer = plan.model.weights - plan.model.held
    assert learner.nbytes + fewer > plan.budget, "in 16 bits the base leaves no room for a pass"


@pytest.mark.parametrize("name", FILES)
def test_its_rewards_and_columns_are_of_rows_like_those_it_names(
    name: str, tmp_path: Path, tiny_model: Path, digits_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(FILES[name])
    sample = RewardSample(completion=GOOD, answer="60")
    assert sum(load_reward(one.function)(sample) * one.weight for one in config.reward.functions) == 1
    row = {config.data.prompt_key: "Find x.", "answer": "60"}
    if name not in TEXT:
        images = pq.read_table(digits_data / "rl.parquet").to_pylist()[0]["images"]
        row |= {"images": images, config.data.prompt_key: "<image>Find x."}
    pq.write_table(pa.Table.from_pylist([row] * 64), tmp_path / "rows.parquet")
    place = [
        f"run_dir={tmp_path / 'run'}",
        f"model.path={tiny_model}",
        "model.max_pixels=0",
        f"data.max_response_length={min(config.data.max_response_length, 512)}",
        "data.chat_template_kwargs={}",  # names of the real model's template
    ]
    files = [f"data.{split}_files=[{tmp_path}/rows.parquet]" for split in ("train", "val")]
    assert main(["train", str(FILES[name]), "--dry-run", *place, *files]) == 0
    seen = capsys.readouterr().out
    assert "Find x." in seen
    assert config.data.system_prompt in seen
