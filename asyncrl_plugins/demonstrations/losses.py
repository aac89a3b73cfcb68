"""Policy losses that learn from demonstrations beside what the policy sampled.

`tokens.provenance.is_inserted` marks the tokens of demonstrations and hints. No policy sampled them: they have no
ratio, correction, entropy bonus or KL, and no part in their group's statistics, unless a method says that it credits
demonstrations. Their mean has a denominator of its own, unless a method says that all tokens share one.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.losses import PolicyLoss, ppo
from asyncrl.algorithms.ratios import PolicyTokens, ratio, row_mean
from asyncrl.algorithms.trajectories import Credit, Trajectories
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl_plugins.demonstrations.settings import (
    ChordConfig,
    HptConfig,
    LuffyConfig,
    SrftConfig,
    SuccessGateConfig,
    UftConfig,
)


def chord_mu(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """PPO and imitation, whose weight mu rises, falls and stays small (CHORD-mu). A demonstration in each group stands
    in for the paper's batches of expert rows from other prompts; it has no advantage."""
    settings, p = config.settings_of(ChordConfig), tokens.logprobs.detach().exp()
    mu = settings.mu(tokens.version)
    weighting = {"none": torch.ones_like(p), "phi": p * (1 - p), "probability": p}[settings.weighting]
    return _imitating(tokens, ppo(tokens, config), mu * weighting, share=1 - mu)


def chord_phi(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """CHORD-mu that learns most from tokens of which the policy is neither sure nor ignorant (CHORD-phi). The constant
    mu is reconstructed, not read in the paper."""
    return chord_mu(tokens, config)


def luffy(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Demonstrations as members of their group, scored as it is, with the behaviour's probability taken for 1 and a
    shape that favours their unlikely tokens (LUFFY). Sampled tokens are not clipped."""
    assert tokens.provenance is not None
    of_sampled = -tokens.advantages * ratio(tokens.logprobs, tokens.proximal_logprobs)
    p, gamma = tokens.logprobs.exp(), config.settings_of(LuffyConfig).gamma
    slope = (tokens.advantages * gamma * p / (p + gamma) ** 2).detach()
    of_inserted = -tokens.advantages * p / (p + gamma)
    return PolicyLoss(torch.where(tokens.provenance.is_inserted, of_inserted, of_sampled), {}, supervised_weight=slope)


def uft(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """PPO on completions that begin with a hint, and imitation of the hint itself (UFT). Hints get shorter, and end
    (`algorithm.demonstrations.hints`); their number and steps are those of the authors' script, the first and the last
    probability are reconstructed."""
    weight = torch.full_like(tokens.advantages, config.settings_of(UftConfig).coef)
    return _imitating(tokens, ppo(tokens, config), weight)


def hpt(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Each group learns from what it sampled or from its demonstration, never from both (HPT, hard gate). The selection
    `success_gate` decides; each prompt counts the same."""
    weight = torch.full_like(tokens.advantages, config.settings_of(HptConfig).coef)
    return _imitating(tokens, ppo(tokens, config), weight)


def success_gate(t: Trajectories, credit: Credit, config: AlgorithmConfig) -> torch.Tensor:
    """Mask [N] of the tokens that HPT leaves out of a group's policy loss. A row is right if its score is
    `algorithm.success_gate.success_score` or above; groups without a demonstration keep what they sampled."""
    if t.provenance is None:
        return torch.zeros_like(t.row, dtype=torch.bool)
    settings = config.settings_of(SuccessGateConfig)
    inserted, rows, groups = t.provenance.is_inserted, len(t.scores), int(t.group.max()) + 1 if len(t.group) else 0
    is_demonstration = torch.zeros(rows, dtype=torch.bool)
    is_demonstration[t.row[inserted]] = True
    sampled = (t.lengths > 0) & ~is_demonstration & ~t.scores.isnan()
    right = sampled & (t.scores >= settings.success_score)
    count = torch.zeros(3, groups, dtype=torch.long)
    for line, chosen in zip(count, (sampled, right, is_demonstration & (t.lengths > 0)), strict=True):
        line.index_add_(0, t.group, chosen.long())
    passed = (count[1] > settings.gate * count[0]) | (count[2] == 0)
    return torch.where(passed[t.group[t.row]], inserted, ~inserted)


def srft(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Imitation and off-policy gradient of demonstrations, and rewards of +1 and -1 for what was sampled, weighed by
    the mean entropy H of each row (SRFT). A row is right if its score is `algorithm.srft.success_score` or above."""
    assert tokens.provenance is not None
    assert tokens.entropies is not None
    assert tokens.scores is not None
    logprobs, settings = tokens.logprobs, config.settings_of(SrftConfig)
    entropy = row_mean(tokens.entropies, tokens.row)
    imitation = settings.supervised_coef * (-entropy).exp()
    # The ratio to a behaviour policy that is taken for certain: p / 1.
    of_inserted = -imitation * logprobs - tokens.advantages * logprobs.exp()
    right = tokens.scores >= settings.success_score
    of_sampled = torch.where(right, -settings.right_coef * entropy.exp() * logprobs, logprobs)
    return PolicyLoss(
        torch.where(tokens.provenance.is_inserted, of_inserted, of_sampled), {}, supervised_weight=imitation
    )


def _imitating(tokens: PolicyTokens, of_sampled: PolicyLoss, weight: torch.Tensor, *, share: float = 1.0) -> PolicyLoss:
    """A share of the loss of sampled tokens, and the negative log-likelihood of inserted ones, weighted. [n] weight"""
    assert tokens.provenance is not None
    return PolicyLoss(
        torch.where(tokens.provenance.is_inserted, -weight * tokens.logprobs, share * of_sampled.token_loss),
        {name: indicator & ~tokens.provenance.is_inserted for name, indicator in of_sampled.indicators.items()},
        supervised_weight=weight,
    )
