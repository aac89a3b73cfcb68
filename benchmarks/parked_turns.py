"""Seconds of a later turn of a conversation on the `hf` engine: behind the parked row, and with the whole row again.

    python -m benchmarks.parked_turns [--sizes demo 100m] [--lengths 200 1000 4000] [--tokens 16] [--repeats 3]

Conversations of four turns whose first prompts have so many tokens, two images among them. After each turn follow 32
tokens, half of them an image. Both ways take each turn one after the other, on one engine and one thread, and must
sample the same tokens. Prints a Markdown table of CPU seconds: medians of the later turns of all repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from asyncrl.demo.model import main as make_demo
from asyncrl.processing.model_inputs import joined_row, sampled_piece
from asyncrl.processing.processor import EncodedPrompt
from benchmarks.random_models import make_model
from protocol.messages import Sampling
from rollout_server.engines.base import Completion, GenerationRequest, Parking
from rollout_server.engines.hf.decode_batch import DecodeBatch
from rollout_server.engines.hf.decode_loop import DecodeLoop

TURNS, SHOWN, IMAGE = 4, 32, 16
"""Turns, and tokens that follow each: so many of them are an image's."""
CPU = torch.device("cpu")


class Row:
    """A conversation so far."""

    def __init__(self, model: Any, length: int, tokens: int, parks: bool):
        self._model, self._turn, self._draw = model, 0, np.random.default_rng(0)
        self._parking = (Parking(),) if parks else ()
        self._prompt = joined_row(self._shown(length // 2), [self._shown(length - length // 2)])
        self._sampling = Sampling(temperature=1.0, max_new_tokens=tokens, stop_token_ids=(), banned_token_ids=())

    def _shown(self, length: int) -> EncodedPrompt:
        """Text around an image."""
        config = self._model.config
        ids = self._draw.integers(10, 200, length).astype(np.int32)
        ids[1], ids[2 : 2 + IMAGE], ids[2 + IMAGE] = (
            config.vision_start_token_id,
            config.image_token_id,
            config.vision_end_token_id,
        )
        types = (ids == config.image_token_id).astype(np.int32)
        side = 2 * int(IMAGE**0.5)
        pixels = torch.from_numpy(self._draw.random((side**2, 6 * config.vision_config.patch_size**2), np.float32))
        grid = np.array([[1, side, side]], np.int32)
        return EncodedPrompt("row", ids, types, grid, (str(pixels[0, 0]),), pixel_values=pixels)

    async def take_turn(self, loop: DecodeLoop) -> tuple[list[int], float]:
        """Tokens of the next turn, and its CPU seconds."""
        stream = (0, self._turn) if self._turn else ()
        request = GenerationRequest(0, self._prompt, 1, 7, self._sampling, stream=stream, parking=self._parking)
        started = time.process_time()
        (sampled,) = [item async for item in loop.generate([request])]
        seconds = time.process_time() - started
        if not isinstance(sampled, Completion):
            raise sampled.error
        self._prompt = joined_row(self._prompt, [sampled_piece(sampled.token_ids), self._shown(SHOWN)])
        self._turn += 1
        return sampled.token_ids.tolist(), seconds


async def measure(model: Any, length: int, tokens: int, repeats: int) -> list[float]:
    """Median seconds of a later turn, with the whole row and behind the parked one."""
    seconds: tuple[list[float], ...] = ([], [])
    banned = [getattr(model.config, f"{name}_token_id") for name in ("image", "video", "vision_start", "vision_end")]
    loop = DecodeLoop(lambda: DecodeBatch(model, banned, CPU), 4, row_tokens=2 * length + 1000)
    loop.start()
    for _ in range(repeats):
        rows = [Row(model, length, tokens, parks) for parks in (False, True)]
        for number in range(TURNS):
            said = []
            for row, taken in zip(rows, seconds, strict=True):
                ids, took = await row.take_turn(loop)
                said.append(ids)
                if number:
                    taken.append(took)
            assert said[0] == said[1], f"other tokens in turn {number}"
    await loop.close()
    return [median(taken) for taken in seconds]


def load(size: str, folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    if size == "demo":
        make_demo(["--out", str(folder / size)])
    else:
        make_model(folder / size, size)
    model = AutoModelForImageTextToText.from_pretrained(folder / size, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["demo", "100m"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[200, 1000, 4000])
    parser.add_argument("--tokens", type=int, default=16, help="sampled in each turn")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("| model | tokens of the prompt | s with the whole row | s behind the parked row | ratio |")
    print("|---|---|---|---|---|")
    with (
        tempfile.TemporaryDirectory() as scratch,
        # Turns of one length: what is cut would end a conversation.
        patch("rollout_server.engines.hf.decode_batch._may_go_on", lambda row: row.parking is not None),
    ):
        for size in options.sizes:
            model = load(size, Path(scratch))
            for length in options.lengths:
                whole, parked = asyncio.run(measure(model, length, options.tokens, options.repeats))
                print(f"| {size} | {length:,} | {whole:.3f} | {parked:.3f} | {whole / parked:.1f} |", flush=True)


if __name__ == "__main__":
    main()
