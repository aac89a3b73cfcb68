"""Coefficients that move during a run: of the KL to the reference, and of the entropy bonus.

A step uses what the steps before it have led to. The state is in checkpoints, so that a step that is made again uses
the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from asyncrl.algorithms.kl import mean_over_rows
from asyncrl.config.algorithm import AlgorithmConfig, KlControlConfig
from asyncrl.config.methods import EntropyControlConfig

LARGEST_MOVE = 0.2
"""The relative distance to the target is cut here before it moves the coefficient."""


class KlController:
    """A factor of the KL's coefficients. Pure arithmetic.

    >>> controller = KlController(KlControlConfig(kind="adaptive", target=0.1, horizon=10000), total_steps=100)
    >>> controller.observe(kl=0.5, rows=512)
    >>> round(controller.factor(version=1), 5)
    1.01024
    """

    def __init__(self, config: KlControlConfig, total_steps: int):
        self._config = config
        self._total_steps = total_steps
        self._factor = 1.0

    def factor(self, version: int) -> float:
        """Factor of the step that the policy of this version takes."""
        if self._config.kind == "linear":
            return max(1 - version / self._total_steps, 0.0)
        return self._factor

    def observe(self, kl: float, rows: int) -> None:
        """Take a step's KL and its number of trajectories: factor *= 1 + clip(kl / target - 1, +-0.2) * rows / horizon
        (arXiv 1909.08593, section 2.2)."""
        if self._config.kind == "adaptive":
            error = min(max(kl / self._config.target - 1, -LARGEST_MOVE), LARGEST_MOVE)
            self._factor *= 1 + error * rows / self._config.horizon

    def state(self) -> dict[str, float]:
        """State for the checkpoint; empty where it follows from the settings."""
        return {"factor": self._factor} if self._config.kind == "adaptive" else {}

    def restore(self, state: Mapping[str, float]) -> None:
        self._factor = float(state["factor"])


class EntropyController:
    """The coefficient of the entropy bonus. With a target there is a bonus only after a step whose entropy was not
    above it; the coefficient grows with each such step, and falls with each other one (Skywork-OR1, arXiv 2505.22312).

    >>> controller = EntropyController(0.0, EntropyControlConfig(target=0.2, delta=0.005))
    >>> controller.observe(0.1), controller.applied
    (None, 0.005)
    >>> controller.observe(0.3), controller.applied
    (None, 0.0)
    """

    def __init__(self, coefficient: float, config: EntropyControlConfig):
        self._config = config
        self._coefficient = coefficient
        self.applied = coefficient
        """Weight of the entropy in the next step's loss: the coefficient, or 0."""

    def observe(self, entropy: float) -> None:
        """Take the mean entropy of a step's tokens, in nats."""
        c = self._config
        if not c.target:
            return
        is_low = entropy <= c.target
        moved = self._coefficient + (c.delta if is_low else -c.delta)
        self._coefficient = min(max(moved, 0.0), 1.0)
        self.applied = self._coefficient if is_low else 0.0

    def state(self) -> dict[str, float]:
        """State for the checkpoint; empty where it follows from the settings."""
        return {"coefficient": self._coefficient, "applied": self.applied} if self._config.target else {}

    def restore(self, state: Mapping[str, float]) -> None:
        self._coefficient, self.applied = float(state["coefficient"]), float(state["applied"])


@dataclass(frozen=True)
class StepCoefficients:
    """Weights of one step, by the names of their settings."""

    entropy_coeff: float
    kl_loss_coef: float
    kl_reward_coef: float


class Coefficients:
    """The coefficients of a run's steps."""

    def __init__(self, config: AlgorithmConfig, total_steps: int):
        self._config = config
        self._kl = KlController(config.kl_control, total_steps)
        self._entropy = EntropyController(config.entropy_coeff, config.entropy_control)
        self._controllers = {"kl_control": self._kl, "entropy_control": self._entropy}

    def of_step(self, version: int) -> StepCoefficients:
        """Coefficients of the step that the policy of this version takes."""
        factor = self._kl.factor(version)
        return StepCoefficients(
            self._entropy.applied, factor * self._config.kl_loss_coef, factor * self._config.kl_reward_coef
        )

    def report(self, used: StepCoefficients) -> dict[str, float]:
        """Coefficients of a step for metrics.jsonl, where the settings ask for them."""
        c = self._config
        bonus = {"entropy_coeff": used.entropy_coeff} if c.entropy_coeff or c.entropy_control.target else {}
        kl = used.kl_loss_coef if c.kl_loss_coef else used.kl_reward_coef
        return bonus | ({"kl_coef": kl} if c.kl_loss_coef or c.kl_reward_coef else {})

    def observe(self, entropies: torch.Tensor, reference_kl: torch.Tensor | None, row: torch.Tensor) -> None:
        """Take the columns [N] of a step's trained tokens. The KL that counts is the mean over trajectories of their
        tokens' mean; a step without tokens says nothing."""
        if not len(row):
            return
        self._entropy.observe(float(entropies.double().mean()))
        if reference_kl is not None:
            self._kl.observe(*mean_over_rows(reference_kl, row))

    def state(self) -> dict[str, dict[str, float]]:
        """States for the checkpoint, by the controllers' names."""
        return {name: state for name, controller in self._controllers.items() if (state := controller.state())}

    def restore(self, states: Mapping[str, Mapping[str, float]]) -> None:
        """Continue from `state()`; controllers that it does not name begin anew."""
        for name, controller in self._controllers.items():
            if name in states and controller.state():
                controller.restore(states[name])
