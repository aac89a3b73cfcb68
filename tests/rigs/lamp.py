"""An environment that shows a picture at the beginning and after each turn, until a third turn ends it."""

from __future__ import annotations

import json
import random
import time
from typing import Any

from PIL import Image

from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.interface import Action, PromptTools, Start, observe
from asyncrl.environments.observation import Observation, StepResult

SWITCH = {"name": "switch", "description": "Switch the lamp.", "parameters": {"type": "object", "properties": {}}}


class Lamp:
    """Prompts tell of a switch, which no turn has to use."""

    @classmethod
    async def prepare(cls, config: Any, image_rule: ImageRule) -> PromptTools | None:
        return PromptTools(({"type": "function", "function": SWITCH},), f"You can call: {json.dumps(SWITCH)}")

    def reset(self, start: Start) -> Observation:
        self._turns = 0
        return observe("a lamp: ", _picture(start.seed % 200))

    def step(self, action: Action) -> StepResult:
        self._turns += 1
        shown = observe(f"{len(action.text)} signs", _picture(self._turns))
        return StepResult(shown, reward=0.25, done=self._turns == 3, state_key=bytes([self._turns]))


class SlowLamp(Lamp):
    """Answers after a time that nothing determines, and has no switch."""

    @classmethod
    async def prepare(cls, config: Any, image_rule: ImageRule) -> None:
        return None

    def step(self, action: Action) -> StepResult:
        time.sleep(random.SystemRandom().uniform(0, 0.02))
        return super().step(action)


def _picture(brightness: int) -> Image.Image:
    return Image.new("RGB", (42, 28), (brightness, brightness, 0))
