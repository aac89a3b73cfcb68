"""Advantage estimators that give each turn of a trajectory its own, beside the core's gigpo."""

from __future__ import annotations

import torch

from asyncrl.algorithms.advantages import normalised
from asyncrl.algorithms.trajectories import Credit, Trajectories, group_statistics
from asyncrl.algorithms.turn_advantages import number_turns, returns_of_turns, same_number, sums_of_turns
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl_plugins.methods.advantages import has_others
from asyncrl_plugins.methods.settings import MtGrpoConfig


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
