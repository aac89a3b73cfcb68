"""Demonstrations of an environment's own policy, as rows of a supervised warm start: one for each turn."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator
from typing import Any

from asyncrl.config.environment import EnvironmentConfig
from asyncrl.environments.loading import LoadedEnvironment
from asyncrl.errors import UserError
from asyncrl_plugins.evaluation import play

IMAGE = "<image>"
"""Place of an image in the text of a message."""


def demonstrations(
    loaded: LoadedEnvironment, config: EnvironmentConfig, policy: str, numbers: Iterable[int], split: str
) -> Iterator[dict[str, Any]]:
    """Rows with the conversation before each turn (`prompt`, `images`) and the turn itself (`target`).

    `numbers` are those of the environment's rows. Raises UserError where it fails, and where it edits histories.
    """
    turns_of = play.policy_of(loaded, policy)
    for number in numbers:
        row = play.make_row(loaded, number, split)
        start = play.start_of(loaded, row, number)
        talk = _Talk(row)
        turns = turns_of(start, random.Random(f"{number}"))
        played = asyncio.run(play.play(loaded, config, start, turns, talk))
        if played.end.startswith("environment_"):
            raise UserError(f"the episode of row {number}: {played.end}")
        yield from talk.rows


class _Talk:
    """An episode so far, told part by part."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.rows: list[dict[str, Any]] = []
        prompt, given = row.get("prompt", ""), row.get("images") or []
        self._messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        self._images = list(given) if isinstance(given, list) else [given]
        self._begins = False
        """True where the next part begins a message."""

    def __call__(self, kind: str, part: Any) -> None:
        match kind:
            case "policy":
                messages = [dict(message) for message in self._messages]
                self.rows.append({"prompt": messages, "images": list(self._images), "target": part})
                self._messages.append({"role": "assistant", "content": part})
            case "history":
                raise UserError("this environment edits histories, and a demonstration's row holds a whole one")
            case "message":
                self._begins = len(self.rows) > 0  # the opening ends the prompt's last message
            case "tool" | "user":
                self._add(kind, part)

    def _add(self, role: str, part: str | bytes) -> None:
        if isinstance(part, bytes):
            self._images.append(part)
        if self._begins:
            self._messages.append({"role": role, "content": ""})
            self._begins = False
        self._messages[-1]["content"] += IMAGE if isinstance(part, bytes) else part
