"""An environment whose answers come from a search service."""

from __future__ import annotations

import urllib.request

from pydantic import BaseModel

from asyncrl.environments.interface import Action
from asyncrl.environments.observation import Message, Observation, StepResult


class Searcher:
    class Config(BaseModel):
        url: str

    def reset(self, start) -> None:
        self.url = start.config.url

    def step(self, action: Action) -> StepResult:
        try:
            with urllib.request.urlopen(self.url, timeout=5) as response:
                return StepResult(Observation((Message("tool", (response.read().decode(),)),)))
        except OSError as error:
            raise RuntimeError(f"the search at {self.url} failed: {error}") from error
