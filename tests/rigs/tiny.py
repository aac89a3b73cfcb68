"""The smallest vision-language model and data that behave like real ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.config.schema import RunConfig

ROOT = Path(__file__).parents[2]
GRPO = ROOT / "asyncrl" / "demo" / "grpo.yaml"


def make_tiny_model(folder: Path, *, intermediate: int = 128) -> Path:
    """A Qwen2-VL folder of 0.2 M parameters (of 1.0 M with an `intermediate` of 2048), with tokenizer and processor."""
    from asyncrl.demo import model  # torch and transformers: not for tests that make no model

    size = ["--hidden", "64", "--intermediate", str(intermediate), "--layers", "2"]
    size += ["--vision-dim", "32", "--vision-depth", "1"]
    model.main(["--out", str(folder), "--vision-heads", "2", *size])
    return folder


def make_digits(folder: Path, *, rl_rows: int = 64) -> Path:
    """Folder with sft.parquet, rl.parquet and eval.parquet."""
    from asyncrl.demo import data

    rows = ["--sft-rows", "64", "--rl-rows", str(rl_rows), "--eval-rows", "16"]
    data.main(["--out", str(folder), *rows])
    return folder


def make_tiny_classifier(folder: Path, *, labels: int = 1) -> Path:
    """A Qwen2 sequence classifier of 64 positions with random weights, its tokenizer and chat template."""
    import torch
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    from asyncrl.demo import model

    tokenizer = model.build_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_labels=labels,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small_config(model: Path, data: Path, run_dir: Path, /, **sections: dict[str, Any]) -> RunConfig:
    """A small valid configuration; keyword arguments replace keys of its sections."""
    from asyncrl.config.schema import RunConfig

    base: dict[str, Any] = {
        "run_dir": str(run_dir),
        "model": {"path": str(model), "dtype": "float32", "freeze_vision_tower": False},
        "data": {
            "train_files": [str(data / "rl.parquet")],
            "val_files": [str(data / "eval.parquet")],
            "max_prompt_length": 128,
            "max_response_length": 8,
        },
        "batch": {"prompts_per_step": 4, "group_size": 4, "tokens_per_microbatch": 512},
        "learner": {"max_staleness": 0, "cpu_threads": 1, "optim": {"lr": 1e-3, "weight_decay": 0.0}},
        "rollout": {"cpu_threads": 1, "max_concurrent_sequences": 64},
        "reward": {
            "functions": [{"function": str(ROOT / "tests" / "rigs" / "short_reward.py:short")}],
            "workers": 1,
        },
        "evaluation": {"before_training": False},
        "trainer": {"max_steps": 3, "samples_per_step": 4},
        "network": {"control_port": 0, "weights_port": 0, "heartbeat_s": 0.2},
        "telemetry": {"learner_port": 0, "rollout_port": 0},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values}
    if base["rollout"].get("engine") == "scripted":  # its log-probs are made up
        base["alignment"] = {"rows": 0}
    return RunConfig.model_validate(base)
