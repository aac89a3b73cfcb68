"""Advantage estimators that give each token its own: returns to come, against a critic or a baseline by place.

Only trained tokens are seen: what a recursion skips (observations, padding) is not there. Rewards of turns are at the
last trained token of each.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.trajectories import Credit, Trajectories
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.methods import GaeConfig


def gae(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Generalised advantage estimation, whitened over the batch; returns are advantages plus values.

    `algorithm.gae.critic_lam` makes the critic's targets with a lambda of their own (VC-PPO, arXiv 2503.01491), and
    `algorithm.gae.length_alpha` the policy's lambda 1 - 1 / (alpha length) (VAPO, arXiv 2504.05118).
    """
    assert t.values is not None
    settings = config.settings_of(GaeConfig)
    lam = torch.full((len(t.scores),), settings.lam)
    if settings.length_alpha:
        lam = (1 - 1 / (settings.length_alpha * t.lengths.clamp_min(1))).clamp(0, 1)
    advantages = generalised_advantages(t, config.gamma, lam)
    of_critic = advantages
    if settings.length_alpha or settings.critic_lam != settings.lam:
        of_critic = generalised_advantages(t, config.gamma, torch.full_like(lam, settings.critic_lam))
    return Credit(whiten(advantages) if settings.whiten else advantages, returns=of_critic + t.values)


def generalised_advantages(t: Trajectories, gamma: float, lam: torch.Tensor) -> torch.Tensor:
    """[N] not whitened. `lam` [B] of each row."""
    assert t.values is not None
    rewards, values = t.padded(t.rewards), t.padded(t.values)
    advantages = torch.zeros_like(rewards)
    later, next_value = torch.zeros(len(rewards)), torch.zeros(len(rewards))
    for place in reversed(range(rewards.shape[1])):
        is_there = place < t.lengths
        delta = rewards[:, place] + gamma * next_value - values[:, place]
        later = torch.where(is_there, delta + gamma * lam * later, later)
        next_value = torch.where(is_there, values[:, place], next_value)
        advantages[:, place] = later
    return t.flat(advantages)


def returns_to_come(t: Trajectories, gamma: float) -> torch.Tensor:
    """[N] discounted sum of the rewards from each token on."""
    rewards = t.padded(t.rewards)
    returns, later = torch.zeros_like(rewards), torch.zeros(len(rewards))
    for place in reversed(range(rewards.shape[1])):
        later = rewards[:, place] + gamma * later
        returns[:, place] = later
    return t.flat(returns)


def reinforce_plus_plus(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Discounted return of each token, whitened over the batch; groups play no part (REINFORCE++)."""
    returns = returns_to_come(t, config.gamma)
    return Credit(whiten(returns), returns)


def remax(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Score minus that of the group's greedy completion, which is not trained (ReMax).

    A group whose greedy completion could not be scored gets 0.
    """
    assert t.provenance is not None
    is_baseline = t.provenance.is_baseline
    baseline = torch.full((int(t.group.max()) + 1 if len(t.group) else 0,), torch.nan)
    baseline[t.group[is_baseline]] = t.scores[is_baseline]
    to_come = returns_to_come(t, gamma=1.0)
    return Credit((to_come - baseline[t.group][t.row]).nan_to_num(0.0), returns=to_come)


def reinforce(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Discounted return of each token, as it is (REINFORCE, Williams 1992)."""
    returns = returns_to_come(t, config.gamma)
    return Credit(returns, returns)


def whiten(values: torch.Tensor) -> torch.Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over all trained tokens of the batch, variance unbiased. [N] -> [N]"""
    centred = values - values.mean() if len(values) else values
    variance = (centred**2).sum() / max(len(values) - 1, 1)
    return centred / (variance + 1e-8).sqrt()
