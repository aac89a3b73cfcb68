"""A small OpenEnv server with the real package: `python server.py PORT`."""

from __future__ import annotations

import base64
import io
import os
import sys
import time
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from PIL import Image
from pydantic import Field


class Guess(Action):
    """Guess the number."""

    number: int = Field(description="your guess, 0 to 7")


class Heard(Observation):
    hint: str
    picture: str
    asked: int


class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
        self.number, self.asked = kwargs.get("number", (seed or 0) % 8), 0
        return self.heard("Guess my number, 0 to 7.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        self.asked += 1
        if action.number < 0:
            raise RuntimeError("the number has no place")
        if action.number == 99:
            time.sleep(60)
        if action.number == 98:
            os._exit(3)
        won = action.number == self.number
        return self.heard("higher" if action.number < self.number else "lower", 1.0 if won else 0.125, won)

    def heard(self, hint: str, reward: float | None = None, done: bool = False) -> Heard:
        buffer = io.BytesIO()
        Image.new("RGB", (56 + self.asked, 56), "blue").save(buffer, "PNG")
        return Heard(
            hint=hint, picture=base64.b64encode(buffer.getvalue()).decode(), asked=self.asked, reward=reward, done=done
        )

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Numbers, Guess, Heard, max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
