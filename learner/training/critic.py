"""The critic: a model of its own whose head tells the value of the state before each token.

It starts from the policy's weights with a head of zeros, so that its first values are 0, or from `critic.path`: where
that folder has a head that scores sequences (a reward model's), it is the head to begin with.
"""

from __future__ import annotations

from pathlib import Path

import torch

from asyncrl.config.part_settings import ModelSettings
from asyncrl.config.service_sections import CriticConfig
from asyncrl.models.output_head import add_value_head, read_score_head, values
from asyncrl.models.wake_parity import fixed_tokens
from learner.ranks.group import ALONE, Ranks
from learner.training.engine import TorchEngine
from learner.training.packing import MicroBatch
from learner.training.train_engine import Write

WEIGHTS_FILE = "critic.safetensors"
FOLDER = "critic"
"""Folder in a checkpoint."""


class Critic(TorchEngine):
    """A training engine whose outputs are values; it is never published."""

    role = "critic"

    def __init__(self, settings: ModelSettings, critic: CriticConfig, total_updates: int, ranks: Ranks = ALONE):
        super().__init__(settings, critic.optim, total_updates, ranks)
        self._has_folder = bool(critic.path)

    def _make_head(self) -> None:
        head = add_value_head(self.model, self.sharding.load_device)
        if self._has_folder:
            read_score_head(head, self._settings.model)
        self._fixed_tokens = fixed_tokens(self.model.get_output_embeddings().weight.shape[0], [])

    def values(self, micro_batch: MicroBatch) -> torch.Tensor:
        """[n] fp32 value of the state before each trained token."""
        self._sleeper.check_awake()
        return self.sharding.run(lambda: values(self.model, self._inputs(micro_batch), micro_batch.predict_from))

    def _fixed_logprobs(self) -> torch.Tensor:
        """Values of the fixed tokens, compared before sleeping and after waking."""
        with torch.no_grad():
            return self.values(self._fixed_micro_batch()).cpu()

    def files(self, *, copies: bool) -> Write:
        """Weights, masters, optimiser and schedule."""
        writes = (self.sharding.weights_files(WEIGHTS_FILE, copies=copies), super().files(copies=copies))

        def write(folder: Path) -> None:
            for each in writes:
                each(folder)

        return write

    def load(self, folder: Path) -> None:
        self.sharding.load_weights(folder / WEIGHTS_FILE)
        super().load(folder)
