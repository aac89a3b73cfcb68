"""A small vision tower and connector whose image tokens resemble the language model's own words.

    python -m asyncrl_plugins.demos.vision blank FOLDER
    python -m asyncrl_plugins.demos.vision align COMPOSED TARGET --rows captions.parquet [--cpu-seconds 240]

A tower that is trained on answers alone does not learn shapes in minutes. Here the target is dense: the first half of
an image's tokens is drawn to the embedding of its first word (the colour), the second half to that of its second one
(the shape), by a classification over all words of each column and by the squared distance.
"""

from __future__ import annotations

import argparse
import io
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from asyncrl.launch.command import command

SIDE, PATCH, WIDTH, LAYERS = 32, 4, 96, 2
"""Tower: pixels of an image's side and of a patch's, features, layers."""
COLUMNS = ("colour", "shape")
ROWS = 32
"""Images of a step."""
SHARPNESS = 10.0
"""Factor of the cosines that are classified."""


def write_blank_tower(folder: Path, seed: int = 0) -> None:
    """Write a SigLIP vision tower of random weights with its image processor."""
    from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    torch.manual_seed(seed)
    config = SiglipVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH // 32,
        image_size=SIDE,
        patch_size=PATCH,
    )
    SiglipVisionModel(config).save_pretrained(folder)
    SiglipImageProcessor(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)


@dataclass(frozen=True)
class WordTargets:
    """Words of each column, and the language model's embeddings of them."""

    words: tuple[tuple[str, ...], ...]
    embeddings: tuple[torch.Tensor, ...]
    """[words, width] of each column."""

    @classmethod
    def of(cls, model: Any, tokenizer: Any, table: Any) -> WordTargets:
        embedding = model.get_input_embeddings().weight.detach().float()

        def embedded(word: str) -> torch.Tensor:
            return embedding[tokenizer(f" {word}", add_special_tokens=False).input_ids].mean(0)

        words = tuple(tuple(sorted(set(table[name].to_pylist()))) for name in COLUMNS)
        return cls(words, tuple(torch.stack([embedded(word) for word in each]) for each in words))

    def labels(self, table: Any) -> torch.Tensor:
        """[rows, columns]: number of each row's word in its column."""
        columns = [
            [words.index(word) for word in table[name].to_pylist()]
            for name, words in zip(COLUMNS, self.words, strict=True)
        ]
        return torch.tensor(columns).T

    def logits(self, features: torch.Tensor) -> list[torch.Tensor]:
        """[rows, words] of each column. `features`: [rows, image tokens, width]."""
        parts = features.chunk(len(COLUMNS), dim=1)
        return [
            SHARPNESS * F.normalize(part.mean(1), dim=1) @ F.normalize(words, dim=1).T
            for part, words in zip(parts, self.embeddings, strict=True)
        ]

    def loss(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        parts = features.chunk(len(COLUMNS), dim=1)
        size = torch.cat(self.embeddings).square().sum(1).mean()
        total = features.new_zeros(())
        for column, (part, words, logits) in enumerate(zip(parts, self.embeddings, self.logits(features), strict=True)):
            target = words[labels[:, column]]
            distance = (part - target[:, None]).square().sum(-1).mean() / size
            total = total + F.cross_entropy(logits, labels[:, column]) + distance
        return total


def pixels(table: Any, image_processor: Any) -> torch.Tensor:
    """[rows, channels, height, width] of the first image of each row."""
    images = [Image.open(io.BytesIO(row[0])).convert("RGB") for row in table["images"].to_pylist()]
    made = [
        image_processor(images[at : at + 256], return_tensors="np")["pixel_values"] for at in range(0, len(images), 256)
    ]
    return torch.from_numpy(np.concatenate(made))


def align(
    composed: Path, target: Path, rows: Path, cpu_seconds: float, rate: float = 2e-3, seed: int = 0
) -> list[float]:
    """Train tower and connector of the composed model in `composed`; write it to `target`.

    Returns the share of words told right in a twentieth of the rows, which is not trained on, by column."""
    from transformers import AutoProcessor

    from asyncrl.config.sections import ModelConfig
    from asyncrl.models.export import export_model
    from asyncrl.models.loading import load_model

    torch.manual_seed(seed)
    model: Any = load_model(ModelConfig(path=str(composed), dtype="float32"), device=torch.device("cpu"))
    processor = AutoProcessor.from_pretrained(composed)
    table = pq.read_table(rows)
    targets = WordTargets.of(model, processor.tokenizer, table)
    seen, labels = pixels(table, processor.image_processor), targets.labels(table)
    order = torch.randperm(len(seen))
    held, train = order[: len(seen) // 20], order[len(seen) // 20 :]
    model.requires_grad_(False)
    parts = nn.ModuleList([model.model.vision_tower, model.model.multi_modal_projector]).requires_grad_(True)
    optimizer = torch.optim.AdamW(parts.parameters(), lr=rate, weight_decay=0.01, betas=(0.9, 0.95))
    began, step, share = time.process_time(), 0, 0.0
    while share < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 100) * max(0.02, (1 + math.cos(math.pi * share)) / 2)
        chosen = train[torch.randint(len(train), (ROWS,))]
        loss = targets.loss(features(model, moved(seen[chosen])), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimizer.step()
        step, share = step + 1, (time.process_time() - began) / cpu_seconds
        if step % 200 == 0:
            print(f"step {step}, {share:.0%} of the time: loss {loss.item():.3f}", flush=True)
    found = accuracy(model, targets, seen[held], labels[held])
    export_model(model, processor, target)
    return found


def features(model: Any, images: torch.Tensor) -> torch.Tensor:
    """[images, image tokens, width of the language model]."""
    found = model.get_image_features(pixel_values=images)
    found = getattr(found, "pooler_output", found)
    return (
        torch.stack(list(found))
        if isinstance(found, (list, tuple))
        else found.reshape(len(images), -1, found.shape[-1])
    )


def moved(images: torch.Tensor) -> torch.Tensor:
    """Images shifted by up to a sixteenth of their side, and mirrored every other time."""
    most = images.shape[-1] // 16
    if torch.rand(()) < 0.5:
        images = images.flip(3)
    return images.roll(torch.randint(-most, most + 1, (2,)).tolist(), (2, 3))


@torch.no_grad()
def accuracy(model: Any, targets: WordTargets, images: torch.Tensor, labels: torch.Tensor) -> list[float]:
    logits = targets.logits(features(model, images))
    return [float((each.argmax(1) == labels[:, column]).float().mean()) for column, each in enumerate(logits)]


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(required=True, dest="stage")
    blank = stages.add_parser("blank")
    blank.add_argument("folder", type=Path)
    aligned = stages.add_parser("align")
    aligned.add_argument("composed", type=Path)
    aligned.add_argument("target", type=Path)
    aligned.add_argument("--rows", type=Path, required=True)
    aligned.add_argument("--cpu-seconds", type=float, default=240.0)
    arguments = parser.parse_args(argv)
    if arguments.stage == "blank":
        write_blank_tower(arguments.folder)
    else:
        torch.set_num_threads(1)
        found = align(arguments.composed, arguments.target, arguments.rows, arguments.cpu_seconds)
        told = ", ".join(f"{name} {value:.3f}" for name, value in zip(COLUMNS, found, strict=True))
        print(f"words told right in unseen pictures: {told}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
