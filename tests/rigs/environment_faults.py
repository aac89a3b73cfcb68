"""An environment that fails in every way that a policy asks for, plain and async."""

from __future__ import annotations

import asyncio
import os
import time

from pydantic import BaseModel

from asyncrl.environments.interface import Action, EpisodeOver, Start, ToolError, observe
from asyncrl.environments.observation import Observation, StepResult


class Faults:
    class Config(BaseModel):
        hang_in_reset: str = ""
        """A file: the reset that finds it removes it, and hangs."""

    def reset(self, start: Start) -> Observation:
        self.steps = 0
        if start.config.hang_in_reset and os.path.exists(start.config.hang_in_reset):
            os.remove(start.config.hang_in_reset)
            time.sleep(60)
        return observe(f"seed {start.seed}, {start.row['name']}", role="user")

    def step(self, action: Action) -> StepResult:
        self.steps += 1
        match action.text.split():
            case ["hang"]:
                time.sleep(60)
            case ["die"]:
                os._exit(7)
            case ["raise"]:
                raise KeyError("missing")
            case ["mistake"]:
                raise ToolError("no such place")
            case ["over"]:
                raise EpisodeOver(0.5, {"won": True})
            case ["nothing"]:
                return None  # type: ignore[return-value]
            case ["no", "json"]:
                return StepResult(None, done=True, info={"x": object()})
            case ["nan"]:
                return StepResult(None, float("nan"), True)
            case ["fork"]:
                os.fork()
            case ["sleep", seconds]:
                time.sleep(float(seconds))
            case ["memory"]:
                bytearray(1 << 40)
        return StepResult(observe(f"{self.steps} {action.text}"), reward=0.25, info={"steps": self.steps})


class AsyncFaults(Faults):
    async def step(self, action: Action) -> StepResult:  # type: ignore[override]
        if action.text == "wait":
            await asyncio.sleep(60)
        if action.text.startswith("nap"):
            await asyncio.sleep(float(action.text.split()[1]))
        return super().step(action)


class SlowToClose(AsyncFaults):
    async def close(self) -> None:
        await asyncio.sleep(0.5)
