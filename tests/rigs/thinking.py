"""Policies that think before they answer, and an environment that shows them a picture after each turn."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scripted_engine.engine import ScriptedEngine

from asyncrl.environments.interface import Action, Start, observe
from asyncrl.environments.observation import THINKING_BEGINS, THINKING_ENDS, Observation, StepResult
from rollout_server.engines.base import GenerationRequest


class ThinkingEngine(ScriptedEngine):
    """Thinks a few digits, but not in every turn, and answers with one."""

    def _tokens_of(self, request: GenerationRequest, index: int) -> np.ndarray:
        draw = np.random.default_rng(request.seed_of(index))
        thought = " ".join(map(str, draw.integers(0, 10, draw.integers(1, 6))))
        text = f"{THINKING_BEGINS}{thought}{THINKING_ENDS}" if draw.random() < 0.7 else ""
        ids = self._processor.tokenize(f"{text}answer {draw.integers(0, 10)}")
        return np.asarray([*ids, request.sampling.stop_token_ids[0]], np.int32)


def make_thinking_model(tiny_model: Path, folder: Path) -> Path:
    """A copy of the tiny model whose turns end soon, and often have `</think>` in them, which is one token of it."""
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    shutil.copytree(tiny_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first = len(tokenizer)
    tokenizer.add_tokens([THINKING_BEGINS, THINKING_ENDS])
    tokenizer.save_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert len(tokenizer) <= model.config.text_config.vocab_size
    with torch.no_grad():
        model.lm_head.weight[first : first + 2] *= 15
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(0, 300, 4)]
    model.save_pretrained(folder)
    return folder


class Zoom:
    """Opens with a picture, and shows another one after each turn but the third or fourth, which ends it."""

    def reset(self, start: Start) -> Observation:
        self._turns = 0
        self._most = 3 + start.index % 2
        return observe("look: ", _picture(start.seed % 200, 0))

    def step(self, action: Action) -> StepResult:
        self._turns += 1
        shown = observe(f"part {self._turns} ", _picture(len(action.text), self._turns))
        return StepResult(shown, reward=0.25, done=self._turns == self._most, state_key=bytes([self._turns]))


def _picture(red: int, turn: int) -> Image.Image:
    return Image.new("RGB", (42, 28 + 14 * (turn % 2)), (red % 256, 60 * turn, 40))
