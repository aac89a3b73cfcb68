"""Seven tokens of two rows with published values, and losses of them."""

from __future__ import annotations

import json
from typing import Any

import torch

from asyncrl.algorithms.loading import load_method
from asyncrl.algorithms.losses import PolicyLoss, token_weights
from asyncrl.algorithms.ratios import PolicyTokens
from asyncrl.config.algorithm import AlgorithmConfig
from tests.rigs.provenance import provenance_of
from tests.rigs.tiny import ROOT

VECTORS = json.loads((ROOT / "tests" / "rigs" / "vectors.json").read_text())
GIVEN = VECTORS["loss_inputs"]
MASK = torch.tensor(GIVEN["mask"]).bool()
ROW = torch.arange(2)[:, None].expand(2, 4)[MASK]


def flat(lines: list[list[float]]) -> torch.Tensor:
    """The unmasked tokens of a padded [2, 4]."""
    return torch.tensor(lines)[MASK]


def tokens(logprobs: torch.Tensor | None = None, **replaced: torch.Tensor) -> PolicyTokens:
    old = flat(GIVEN["old_logp"])
    logprobs = flat(GIVEN["logp"]) if logprobs is None else logprobs
    columns: dict[str, Any] = {"proximal_logprobs": old, "behaviour_logprobs": old, "advantages": flat(GIVEN["adv"])}
    marked = torch.zeros(len(old), dtype=torch.bool)
    of_hybrids = {"provenance": provenance_of(ROW), "entropies": old.neg(), "scores": old.exp()}
    return PolicyTokens(**({"logprobs": logprobs, "row": ROW, "marked": marked} | columns | of_hybrids | replaced))


def loss_of(name: str, of: PolicyTokens, **settings: Any) -> tuple[PolicyLoss, AlgorithmConfig]:
    config = AlgorithmConfig(policy_loss=name, **settings)
    return load_method("policy_loss", name, "policy_loss")(of, config), config


def total(loss: PolicyLoss, mode: str) -> torch.Tensor:
    return (token_weights(ROW, mode, max_response_length=4) * loss.token_loss).sum()


def gradient(name: str, of: PolicyTokens | None = None, **settings: Any) -> torch.Tensor:
    """Gradient of each token's loss by its own log-prob."""
    made = of or tokens(flat(GIVEN["logp"]).requires_grad_())
    loss, _ = loss_of(name, made, **settings)
    return torch.autograd.grad(loss.token_loss.sum(), made.logprobs)[0]


def close(got: torch.Tensor, expected: Any, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), atol=tolerance, rtol=tolerance)


def far_tokens(distances: list[float], advantage: float) -> PolicyTokens:
    """One row whose log-probs have moved by these distances since it was sampled; all are unlikely."""
    moved = torch.tensor(distances)
    old = torch.full_like(moved, -200.0)
    columns = (old, old, torch.full_like(moved, advantage), torch.zeros(len(moved), dtype=torch.long))
    return PolicyTokens((old + moved).requires_grad_(), *columns, marked=torch.ones(len(moved), dtype=torch.bool))


FAR = [-150.0, -25.0, -20.5, -3.0, 3.0, 20.5, 25.0, 150.0]
