"""Advantage estimators that give each turn of a trajectory its own: all tokens of a turn have the same.

A turn is what the policy sampled between two observations of an environment. Without one a trajectory is one turn.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.advantages import normalised
from asyncrl.algorithms.registration import advantage
from asyncrl.algorithms.token_advantages import returns_to_come
from asyncrl.algorithms.trajectories import Credit, Trajectories, group_statistics
from asyncrl.config.algorithm import AlgorithmConfig


@advantage(formula="sum_k gamma^k R_(turn+k), normalised in the group", paper="", compares_rows=True)
def step_reinforce(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Discounted return of each turn, against the mean and standard deviation of its group's turns."""
    turn, first = _turns(t)
    returns = _returns_of_turns(t, turn, first, config.gamma)
    g = group_statistics(returns, t.group[t.row[first]])
    return Credit((g.centred / (g.std + 1e-6))[turn], returns[turn])


@advantage(formula="sum_k gamma^k R_(turn+k)")
def agentic_reinforce(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Discounted return of each turn, for all its tokens: gamma counts turns, where `reinforce` counts tokens."""
    turn, first = _turns(t)
    returns = _returns_of_turns(t, turn, first, config.gamma)
    return Credit(returns[turn], returns[turn])


@advantage(
    formula="(G - mean) / (std + 1e-6) over the turns of that number in the group, G = sum_k gamma^k R_(turn+k)",
    needs=("turns",),
    compares_rows=True,
)
def turn_return(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Discounted return of each turn, against turns of the same number in its group: `step_reinforce` compares with all
    turns of the group, early and late.

    A turn that no other row of the group has gets 0. With `norm_adv_by_std=False`: G - mean.
    """
    turn, first = _turns(t)
    returns = _returns_of_turns(t, turn, first, config.gamma)
    return Credit(normalised(returns, _same_number(t, first), config)[turn], returns[turn])


@advantage(
    formula="grpo + w (G - mean) / (std + 1e-6) over the group's turns from the same state, "
    "G = sum_k gamma^k R_(turn+k)",
    paper="2505.10978",
    needs=("turns",),
    defaults={"gamma": 0.95},
    compares_rows=True,
)
def gigpo(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Advantage of the trajectory, and of each turn among those of its group that began in the same state of the
    environment (GiGPO), w = `algorithm.turn_weight`.

    The state is the environment's `state_key` of the turn before; first turns begin in the prompt's. A turn whose state
    occurs once, or is not known, has the trajectory's advantage alone. With `norm_adv_by_std=False` nothing is divided.
    """
    turn, first = _turns(t)
    row = t.row[first]
    state = -_numbers(t, first).clamp_max(1) if t.state is None else t.state[first]
    alone = torch.where(state < 0, torch.arange(1, len(first) + 1), 0)
    anchor = _groups_of(t.group[row], state, alone)
    of_turns = normalised(_returns_of_turns(t, turn, first, config.gamma), anchor, config)
    return Credit((normalised(t.scores, t.group, config)[row] + config.turn_weight * of_turns)[turn])


@advantage(
    formula="grpo of the outcomes + w (R - mean) / (std + 1e-6) over the turns of that number in the group",
    paper="2505.11821",
    needs=("turns",),
    plain_scores=True,
    compares_rows=True,
)
def mt_grpo(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Advantage of the outcome, and of what the environment gave for the turn, each normalised for itself (MT-GRPO),
    w = `algorithm.turn_weight`. The outcome is what the reward functions said of the trajectory.

    The paper has two turns, of which the first alone earns a reward; here each turn has the advantage of its own reward
    R among the turns of the same number in its group.
    """
    turn, first = _turns(t)
    earned = torch.zeros(len(first)) if t.turn_rewards is None else _sums(t.turn_rewards, turn, first)
    outcomes = normalised(t.scores if t.outcomes is None else t.outcomes, t.group, config)[t.row[first]]
    return Credit((outcomes + config.turn_weight * normalised(earned, _same_number(t, first), config))[turn])


def _turns(t: Trajectories) -> tuple[torch.Tensor, torch.Tensor]:
    """Number each turn of each row: [N] the turn of each token, and [K] the first token of each turn."""
    of_row = torch.zeros_like(t.row) if t.turn is None else t.turn
    changes = torch.ones(len(t.row), dtype=torch.bool)
    changes[1:] = (t.row[1:] != t.row[:-1]) | (of_row[1:] != of_row[:-1])
    return changes.cumsum(0) - 1, changes.nonzero()[:, 0]


def _numbers(t: Trajectories, first: torch.Tensor) -> torch.Tensor:
    """[K] number of each turn in its row."""
    return torch.zeros_like(first) if t.turn is None else t.turn[first]


def _same_number(t: Trajectories, first: torch.Tensor) -> torch.Tensor:
    """[K] one number for the turns of a group that have the same number in their rows."""
    return _groups_of(t.group[t.row[first]], _numbers(t, first))


def _groups_of(*columns: torch.Tensor) -> torch.Tensor:
    """[K] one number for the turns that are equal in all columns [K]."""
    return torch.unique(torch.stack(columns), dim=1, return_inverse=True)[1]


def _sums(tokens: torch.Tensor, turn: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """[N] -> [K]"""
    return torch.zeros(len(first)).index_add(0, turn, tokens)


def _returns_of_turns(t: Trajectories, turn: torch.Tensor, first: torch.Tensor, gamma: float) -> torch.Tensor:
    """[K] discounted returns of the turns, from each turn's rewards."""
    earned = _sums(t.rewards, turn, first)
    of_turns = Trajectories(t.scores, t.group, t.row[first], torch.zeros(len(first)), token_rewards=earned)
    return returns_to_come(of_turns, gamma)
