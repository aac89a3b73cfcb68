"""Policy losses beside the core's: `f(tokens: PolicyTokens, config) -> PolicyLoss`."""

from __future__ import annotations

import torch

from asyncrl.algorithms.corrections import total_variation_exceeded
from asyncrl.algorithms.losses import PolicyLoss, gspo, ppo
from asyncrl.algorithms.ratios import PolicyTokens, bound, ratio, row_mean, sequence_ratio
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl_plugins.methods.settings import DppoConfig, KimiConfig, KlCovConfig, SapoConfig


def gmpo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Geometric mean of a trajectory's ratios, each token's clipped in log space on its optimistic side (GMPO).

    Every token of a trajectory has the trajectory's loss, so that its mean is that loss.
    """
    x, sign = tokens.logprobs - tokens.proximal_logprobs, tokens.advantages.sign()
    bounded = x.clamp(-config.clip_ratio_low, config.clip_ratio_high)
    used = sign * torch.minimum(sign * x, sign * bounded)
    used = torch.where(sign == 0, x, used)
    of_row = bound(row_mean(used, tokens.row)).exp()
    return PolicyLoss(
        -row_mean(tokens.advantages, tokens.row) * of_row, {"clip_fraction": (used != x) & (tokens.advantages != 0)}
    )


def sapo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """A soft gate in place of PPO's clip: the gradient's weight is 1 at r = 1 and falls to both sides (SAPO)."""
    r = ratio(tokens.logprobs, tokens.proximal_logprobs)
    settings = config.settings_of(SapoConfig)
    tau = torch.where(tokens.advantages > 0, settings.tau_positive, settings.tau_negative)
    return PolicyLoss(-tokens.advantages * 4 / tau * torch.sigmoid(tau * (r - 1)), {})


def luspo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """GSPO whose trajectories weigh as much as they are long (LUSPO)."""
    return gspo(tokens, config)


def topr(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Right trajectories are imitated, wrong ones unlearnt as far as the policy still makes them (TOPR). r is a token's
    own ratio, as in ROLL; the paper's is the product over the trajectory."""
    r = ratio(tokens.logprobs.detach(), tokens.behaviour_logprobs)
    weight = torch.where(tokens.advantages > 0, 1.0, r.clamp(max=1.0))
    clipped_weight = (tokens.advantages < 0) & (r > 1)
    return PolicyLoss(-weight * tokens.advantages * tokens.logprobs, {"clip_fraction": clipped_weight})


def kimi(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Policy gradient with a squared log-ratio that keeps the policy near the one that sampled (Kimi k1.5). The square
    is of a token's own log-ratio, as in ROLL; the paper's is of the trajectory's, the sum over its tokens."""
    log_r = tokens.logprobs - tokens.behaviour_logprobs
    return PolicyLoss(-tokens.advantages * tokens.logprobs + config.settings_of(KimiConfig).tau / 2 * log_r**2, {})


def vespo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Policy gradient with a soft gate on a trajectory's whole ratio, sharper above 1 where A >= 0 (VESPO)."""
    w = sequence_ratio(tokens.logprobs.detach() - tokens.behaviour_logprobs, tokens.row)
    good = tokens.advantages >= 0
    k, rate = torch.where(good, 2.0, 3.0), torch.where(good, 3.0, 2.0)
    gate = (rate + k * w.log() - rate * w).exp()
    return PolicyLoss(-gate * tokens.advantages * tokens.logprobs, {})


def aspo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """PPO with the ratio of good tokens turned over: those that the policy already likes weigh less (ASPO).

    The gradient is what is flipped, so the test is one of gradients: the value of 1/r has the wrong sign of it.
    """
    plain, a = ppo(tokens, config), tokens.advantages
    r = ratio(tokens.logprobs.detach(), tokens.proximal_logprobs)
    weight = torch.where(r > 1 + config.clip_ratio_high, 0.0, (1 / r).clamp(max=config.clip_ratio_c))
    flipped = -a * weight * (1 + tokens.logprobs - tokens.logprobs.detach())
    return PolicyLoss(torch.where(a > 0, flipped, plain.token_loss), plain.indicators)


def clip_cov(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """PPO whose marked tokens give no gradient: those that would cost the most entropy (Clip-Cov).

    They are drawn before the batch's first update, where r is 1 and no token is clipped. The authors' code draws for
    each update, among tokens that the clip leaves; here a marked token that is clipped later still counts as marked.
    """
    assert tokens.marked is not None
    plain = ppo(tokens, config)
    loss = torch.where(tokens.marked, 0.0, plain.token_loss)
    return PolicyLoss(loss, {**plain.indicators, "clip_fraction_covariance": tokens.marked})


def kl_cov(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Surrogate without a clip, with a penalty at the tokens that would cost the most entropy (KL-Cov)."""
    assert tokens.marked is not None
    loss = -tokens.advantages * ratio(tokens.logprobs, tokens.proximal_logprobs)
    penalty = config.settings_of(KlCovConfig).coef * (tokens.logprobs - tokens.proximal_logprobs).abs()
    return PolicyLoss(torch.where(tokens.marked, loss + penalty, loss), {"clip_fraction_covariance": tokens.marked})


def dppo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """-r A, r = pi_target / pi_behaviour, where the token's probability has not moved too far (DPPO with total
    variation), and kl_tau (log r)^2 at every token: where it is dropped, that term alone leads back. Above
    `algorithm.dppo.upper` r stays there and the token keeps its gradient, as in verl. It uses no proximal policy."""
    difference, settings = tokens.logprobs - tokens.behaviour_logprobs, config.settings_of(DppoConfig)
    dropped = total_variation_exceeded(tokens, settings.delta_low, settings.delta_high)
    r = bound(difference).exp()
    truncated = r > settings.upper
    own = tokens.logprobs - tokens.logprobs.detach()
    r = torch.where(truncated, settings.upper * own.exp(), r)
    surrogate = torch.where(dropped, 0.0, -tokens.advantages * r)
    return PolicyLoss(
        surrogate + settings.kl_tau * difference**2,
        {"clip_fraction_dppo": dropped, "truncation_fraction_dppo": truncated & ~dropped},
    )
