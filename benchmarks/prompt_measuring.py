"""Cost of making a ticket of a row with one image, and of training on it: by sizes of images, and by pixels.

    python benchmarks/prompt_measuring.py

A random Qwen2-VL with the released settings of the image processor (patches of 14, up to 12.8 million pixels). "Pixels"
is what a learner did before: the processor's own call under the prompt processor's lock, its result in a cache of
256 MiB, and another call for each prompt that has left the cache when it is trained on. CPU time, one thread.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from asyncrl.config.sections import ModelConfig
from asyncrl.data.images import content_hash
from asyncrl.processing.processor import PromptProcessor
from protocol.messages import ChatMessage, ImagePart, Prompt, TextPart
from tests.rigs.tiny_families import make_family

SIZES = (98, 448, 1024, 1280, 2048)


def photo(side: int, seed: int) -> bytes:
    """A smooth JPEG: noise at an eighth of the size, enlarged."""
    pixels = np.random.default_rng(seed).integers(0, 255, (max(1, side // 8), max(1, side // 8), 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def prompts(side: int, number: int) -> list[tuple[Prompt, dict[str, bytes]]]:
    made: list[tuple[Prompt, dict[str, bytes]]] = []
    for seed in range(number):
        data = photo(side, seed)
        message = ChatMessage(role="user", content=(ImagePart(), TextPart(text="What is it?")))
        prompt = Prompt(row_id=f"r:{seed}", messages=(message,), image_hashes=(content_hash(data),), answer="x")
        made.append((prompt, {content_hash(data): data}))
    return made


def seconds(call: Callable[[Prompt, dict[str, bytes]], Any], items: list[tuple[Prompt, dict[str, bytes]]]) -> float:
    """Mean CPU seconds of a call."""
    began = time.process_time()
    for prompt, blobs in items:
        call(prompt, blobs)
    return (time.process_time() - began) / len(items)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a batch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        make_family("qwen2_vl", Path(folder))
        model = ModelConfig(path=folder)
        print(
            "| image | pixels of a prompt | ticket: pixels | ticket: sizes | trained again: pixels | trained: sizes |"
        )
        print("|---|---|---|---|---|---|")
        for side in SIZES:
            items = prompts(side, arguments.prompts)
            new, before = released(PromptProcessor(model, cache_mib=0)), released(PromptProcessor(model))
            before._grids = None  # as an image processor that is not known: its own call, under the lock
            seconds(before.encode, prompts(98, 2))
            seconds(new.encode, prompts(98, 2))
            encoded = new.encode(*items[0])
            mib = encoded.nbytes / 2**20
            row = [seconds(before.encode, items), seconds(new.measure, items)]
            row += [seconds(before.encode, items), seconds(new.encode, items)]
            print(f"| {side}² | {mib:.1f} MiB | " + " | ".join(f"{1000 * value:.1f} ms" for value in row) + " |")


def released(processor: PromptProcessor) -> PromptProcessor:
    """Give the tiny model's image processor the settings of Qwen2-VL."""
    images = processor.processor.image_processor
    images.patch_size, images.size = 14, type(images.size)(shortest_edge=56 * 56, longest_edge=12_845_056)
    return processor


if __name__ == "__main__":
    main()
