"""A lamp whose second step waits for as long as a file is there: whoever is killed meanwhile dies inside a turn."""

from __future__ import annotations

import os
import time
from pathlib import Path

from pydantic import BaseModel

from asyncrl.environments.interface import Action, Start
from asyncrl.environments.observation import Observation, StepResult
from tests.rigs.lamp import Lamp

LONGEST_S = 30.0


class HeldLamp(Lamp):
    class Config(BaseModel):
        folder: Path
        """`hold` in it makes steps wait; each that waits has a file `PID-NUMBER`, and removes it where it goes on."""

    def reset(self, start: Start) -> Observation:
        self._folder = start.config.folder
        return super().reset(start)

    def step(self, action: Action) -> StepResult:
        if self._turns == 1 and (self._folder / "hold").exists():
            here = self._folder / f"{os.getpid()}-{time.monotonic_ns()}"
            here.touch()
            until = time.monotonic() + LONGEST_S
            while (self._folder / "hold").exists() and time.monotonic() < until:
                time.sleep(0.005)
            here.unlink()
        return super().step(action)
