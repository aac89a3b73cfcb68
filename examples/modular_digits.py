"""A vision-language model of two random parts learns to compute with handwritten digits, on a CPU.

    python examples/modular_digits.py FOLDER [--seed 1] [--engine vllm] [--quick]

Makes a tiny SigLIP and a tiny Qwen2 of random weights, composes them (`asyncrl compose`), trains the connector alone,
then everything on demonstrations (`asyncrl sft`), then by asynchronous GRPO (`asyncrl train`), and says after each of
them what the model scores on held-out images (plain transformers). The commands are printed: with other parts and data
they are a recipe.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from asyncrl.config.load import load_config
from asyncrl.demo.prepare import GRPO, SFT

SIDE, PATCH = 56, 14
"""Pixels of the square that each image of 56 x 28 becomes, and of a patch: 16 tokens."""
EVERYTHING = ["model.freeze_vision_tower=false"]
FREE_PORTS = [
    *("network.control_port=0", "network.weights_port=0"),
    *("telemetry.learner_port=0", "telemetry.rollout_port=0"),
]
CONNECTOR = ["model.freeze_vision_tower=true", "model.freeze_language_model=true"]


def make_parts(folder: Path, seed: int) -> None:
    """A tower and a language model as they would come from the hub, but small and random."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    from asyncrl.demo.model import build_tokenizer

    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    tower = SiglipVisionModel(SiglipVisionConfig(**{**sizes, "image_size": SIDE, "patch_size": PATCH}))
    words = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    text = Qwen2Config(**sizes, **words, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.06)
    tower.save_pretrained(folder / "tower")
    SiglipImageProcessor(size={"height": SIDE, "width": SIDE}).save_pretrained(folder / "tower")
    Qwen2ForCausalLM(text).save_pretrained(folder / "language")
    tokenizer.save_pretrained(folder / "language")


def run(*words: str) -> None:
    """Run a command in the foreground; one that fails ends this script with its exit code."""
    print(f"\n$ asyncrl {' '.join(words)}", flush=True)
    if code := subprocess.call([sys.executable, "-m", "asyncrl", *words]):
        sys.exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--seed", type=int, default=1, help="of data, weights, order and sampling")
    parser.add_argument("--engine", choices=["hf", "vllm"], default="hf", help="what samples in the last stage")
    parser.add_argument("--quick", action="store_true", help="a few steps of each stage, which learn nothing")
    arguments = parser.parse_args()
    folder, seed, quick = arguments.folder, arguments.seed, arguments.quick
    steps = {"connector": 2, "sft": 4, "grpo": 2} if quick else {"connector": 50, "sft": 600, "grpo": 300}
    rows = ["--sft-rows", f"{64 * (steps['connector'] + steps['sft'])}", "--rl-rows", f"{32 * steps['grpo']}"]
    rows += ["--eval-rows", "16"] if quick else []
    subprocess.run(
        [sys.executable, "-m", "asyncrl.demo.data", "--out", folder / "data", "--seed", str(seed), *rows], check=True
    )
    make_parts(folder, seed)
    parts = [f"vision_tower={folder}/tower", f"language_model={folder}/language", "image_token=<|image_pad|>"]
    run("compose", f"{folder}/composed", *parts, "connector=mlp", "feature_layer=-1", f"seed={seed}")

    data = f"data.val_files=[{folder}/data/eval.parquet]", f"trainer.seed={seed}"
    supervised = [*data, f"data.train_files=[{folder}/data/sft.parquet]"]
    stages = {
        "connector": ("sft", SFT, "composed", [*supervised, *CONNECTOR, f"sft.steps={steps['connector']}"]),
        "sft": ("sft", SFT, "connector/export", [*supervised, *EVERYTHING, f"sft.steps={steps['sft']}"]),
        "grpo": (
            *("train", GRPO, "sft/export"),
            [
                *(*data, *EVERYTHING, *FREE_PORTS, f"rollout.engine={arguments.engine}"),
                *(f"data.train_files=[{folder}/data/rl.parquet]", f"trainer.max_steps={steps['grpo']}"),
            ],
        ),
    }
    scored = [score(folder / "composed", "composed", [*data])]
    for name, (command, config, model, settings) in stages.items():
        began = time.monotonic()
        run(command, str(config), f"run_dir={folder}/{name}", f"model.path={folder}/{model}", *settings)
        seconds = time.monotonic() - began
        scored.append(f"{score(folder / name / 'export', f'after {name}', [*data])}   {seconds:.0f} s")
        print(scored[-1], flush=True)
    print("\nheld-out accuracy, greedy", *scored, sep="\n")


def score(model: Path, name: str, settings: list[str]) -> str:
    from asyncrl_plugins.evaluation.plain_scores import evaluate

    scores = evaluate(load_config(GRPO, [*settings, f"model.path={model}"]), model)
    return f"  {name:<16}{scores.accuracy:.3f} ± {scores.accuracy_error:.3f}"


if __name__ == "__main__":
    main()
