"""Traces: bytes that the engine's model has computed for each token beside its logits, such as the experts it chose.

They travel with a group and are journaled with it (`protocol.messages.TokenTraces`); the learner's model takes them in
place of its own. A method of the kind `token_trace` names a class, which is made with the method's settings and the
language model's part of config.json. An engine that is no torch model in this process names the traces that it has in
its description (`asyncrl.config.parts.RolloutEngine`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.installed_methods import chosen_hooks
from asyncrl.config.sections import ModelConfig
from asyncrl.model_files.folder import read_config, text_part
from asyncrl.plugins import implementation

Recorder = Callable[[], torch.Tensor]
"""Gives [T, width] uint8 of the `T` tokens of the model's last forward pass, padding included, row after row."""
Replay = Callable[[torch.Tensor], AbstractContextManager[None]]
"""Block in which a forward pass takes [L, width] uint8 of a packed sequence, on the model's device. What its backward
pass computes again takes them, too."""


class TokenTrace(Protocol):
    width: int
    """Bytes of a token."""

    def problem(self, rows: np.ndarray) -> str:
        """Fault of [N, width] uint8 that a server sent, for people; empty: none. Called after `replay`."""
        ...

    def record(self, model: Any) -> Recorder:
        """Make the engine's model record. Raises UserError where it has nothing of the kind."""
        ...

    def replay(self, model: Any) -> Replay:
        """Make the learner's model take what was recorded. Raises UserError where it cannot."""
        ...


def token_traces(algorithm: AlgorithmConfig, model: ModelConfig) -> dict[str, TokenTrace]:
    """Traces that the configuration chooses, by the names of their methods."""
    chosen = chosen_hooks("token_trace", algorithm)
    described: Mapping[str, Any] = text_part(read_config(model)) if chosen else {}
    return {name: implementation(method.implementation)(given, described) for name, (method, given) in chosen.items()}
