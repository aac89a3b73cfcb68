"""Advantage estimators that give each turn of a trajectory its own: all tokens of a turn have the same.

A turn is what the policy sampled between two observations of an environment. Without one a trajectory is one turn.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.advantages import normalised
from asyncrl.algorithms.token_advantages import returns_to_come
from asyncrl.algorithms.trajectories import Credit, Trajectories, group_statistics
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl_plugins.methods.advantages import has_others
from asyncrl_plugins.methods.settings import GigpoConfig, MtGrpoConfig


def step_reinforce(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Discounted return of each turn, against the mean and standard deviation of its group's turns."""
    turn, first = number_turns(t)
    returns = returns_of_turns(t, turn, first, config.gamma)
    g = group_statistics(returns, t.group[t.row[first]])
    return Credit((g.centred / (g.std + 1e-6))[turn], returns[turn])


def agentic_reinforce(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Discounted return of each turn, for all its tokens: gamma counts turns, where `reinforce` counts tokens."""
    turn, first = number_turns(t)
    returns = returns_of_turns(t, turn, first, config.gamma)
    return Credit(returns[turn], returns[turn])


def turn_return(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Discounted return of each turn, against turns of the same number in its group: `step_reinforce` compares with all
    turns of the group, early and late.

    A turn that no other row of the group has, such as the last of its longest row, is compared with all turns of the
    group. With `norm_adv_by_std=False`: G - mean.
    """
    turn, first = number_turns(t)
    row, number = t.row[first], same_number(t, first)
    returns = returns_of_turns(t, turn, first, config.gamma)
    alone = (torch.bincount(number)[number] < 2) & has_others(t)[row]
    of_group = normalised(returns, t.group[row], config)
    return Credit(torch.where(alone, of_group, normalised(returns, number, config))[turn], returns[turn])


def mt_grpo(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Advantage of the outcome, and of what the environment gave for the turn, each normalised for itself (MT-GRPO),
    w = `algorithm.mt_grpo.turn_weight`. The outcome is what the reward functions said of the trajectory.

    The paper has two turns, of which the first alone earns a reward; here each turn has the advantage of its own reward
    R among the turns of the same number in its group.
    """
    turn, first = number_turns(t)
    earned = torch.zeros(len(first)) if t.turn_rewards is None else sums_of_turns(t.turn_rewards, turn, first)
    outcomes = normalised(t.scores if t.outcomes is None else t.outcomes, t.group, config)[t.row[first]]
    weight = config.settings_of(MtGrpoConfig).turn_weight
    return Credit((outcomes + weight * normalised(earned, same_number(t, first), config))[turn])


def gigpo(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """Advantage of the trajectory, and of each turn among those of its group that began in the same state of the
    environment (GiGPO), w = `algorithm.gigpo.turn_weight`.

    The state is the environment's `state_key` of the turn before; first turns begin in the prompt's. A turn whose state
    occurs once, or is not known, has the trajectory's advantage alone. With `norm_adv_by_std=False` nothing is divided.
    """
    turn, first = number_turns(t)
    row = t.row[first]
    state = -numbers_in_rows(t, first).clamp_max(1) if t.state is None else t.state[first]
    alone = torch.where(state < 0, torch.arange(1, len(first) + 1), 0)
    anchor = groups_of(t.group[row], state, alone)
    of_turns = normalised(returns_of_turns(t, turn, first, config.gamma), anchor, config)
    return Credit(
        (normalised(t.scores, t.group, config)[row] + config.settings_of(GigpoConfig).turn_weight * of_turns)[turn]
    )


# --- turns ------------------------------------------------------------------------------------------


def number_turns(t: Trajectories) -> tuple[torch.Tensor, torch.Tensor]:
    """Number each turn of each row: [N] the turn of each token, and [K] the first token of each turn."""
    of_row = torch.zeros_like(t.row) if t.turn is None else t.turn
    changes = torch.ones(len(t.row), dtype=torch.bool)
    changes[1:] = (t.row[1:] != t.row[:-1]) | (of_row[1:] != of_row[:-1])
    return changes.cumsum(0) - 1, changes.nonzero()[:, 0]


def numbers_in_rows(t: Trajectories, first: torch.Tensor) -> torch.Tensor:
    """[K] number of each turn in its row."""
    return torch.zeros_like(first) if t.turn is None else t.turn[first]


def same_number(t: Trajectories, first: torch.Tensor) -> torch.Tensor:
    """[K] one number for the turns of a group that have the same number in their rows."""
    return groups_of(t.group[t.row[first]], numbers_in_rows(t, first))


def groups_of(*columns: torch.Tensor) -> torch.Tensor:
    """[K] one number for the turns that are equal in all columns [K]."""
    return torch.unique(torch.stack(columns), dim=1, return_inverse=True)[1]


def sums_of_turns(tokens: torch.Tensor, turn: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """[N] -> [K]"""
    return torch.zeros(len(first)).index_add(0, turn, tokens)


def returns_of_turns(t: Trajectories, turn: torch.Tensor, first: torch.Tensor, gamma: float) -> torch.Tensor:
    """[K] discounted returns of the turns, from each turn's rewards."""
    earned = sums_of_turns(t.rewards, turn, first)
    of_turns = Trajectories(t.scores, t.group, t.row[first], torch.zeros(len(first)), token_rewards=earned)
    return returns_to_come(of_turns, gamma)
