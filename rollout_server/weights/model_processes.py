"""Processes that hold an engine's model or a part of it, for functions of plug-ins that run there.

vLLM's worker processes import this, so it imports as little as possible.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from asyncrl.plugins import implementation


@dataclass
class ModelProcess:
    """One of these processes, as a function that runs in it sees it."""

    device: torch.device
    rank: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    """Objects that functions keep between their calls, by the name of the plug-in."""


class ModelProcesses(Protocol):
    count: int
    own: ModelProcess | None
    """Process of the model, if it is this one alone."""

    async def run(self, function: str, *arguments: Any) -> list[Any]:
        """Call `module:function` with a ModelProcess and the arguments in each process. Returns the results, by rank;
        both are plain values: they may go from process to process."""
        ...

    def at_rest(self) -> AbstractAsyncContextManager[None]:
        """Block in which the engine computes nothing."""
        ...


class ThisProcess:
    """The whole model lies in this process."""

    count = 1

    def __init__(self, device: torch.device):
        self.own: ModelProcess | None = ModelProcess(device)

    async def run(self, function: str, *arguments: Any) -> list[Any]:
        return [implementation(function)(self.own, *arguments)]

    def at_rest(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()
