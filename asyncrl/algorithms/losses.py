"""Policy losses, the critic's loss, and how token losses become one number.

A policy loss is `f(tokens: PolicyTokens, config) -> PolicyLoss`: per-token losses whose gradient is the policy
gradient. It sees trainable tokens only; the correction's weight and the aggregation are applied by the learner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from asyncrl.algorithms.corrections import total_variation_exceeded
from asyncrl.algorithms.ratios import PolicyTokens, log_ratio, ratio, row_mean, sequence_ratio
from asyncrl.algorithms.registration import policy_loss
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.method_settings import PapoConfig
from asyncrl.config.methods import method_of

LARGEST_LOG_RATIO = 10.0
"""Bound of a trajectory's log-ratio plus a token's own in gspo."""
LARGEST_PERCEPTION_KL = 10.0
"""One token's KL to the policy with masked images is cut here: it is made larger, and would grow without end."""


@dataclass(frozen=True)
class PolicyLoss:
    token_loss: torch.Tensor
    """[N]"""
    indicators: Mapping[str, torch.Tensor]
    """[N] bool each; their means over sampled tokens are reported under these names."""
    supervised_weight: torch.Tensor | None = None
    """[N] detached weight of -log p at inserted tokens, for the report; other tokens' values mean nothing."""


LossFunction = Callable[[PolicyTokens, AlgorithmConfig], PolicyLoss]


@policy_loss(formula="max(-A r, -A clip(r, 1 - low, 1 + high)), at most -A c where A < 0", paper="1707.06347")
def ppo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Clipped surrogate around the proximal policy (PPO), clip-higher (DAPO, arXiv 2503.14476) and dual clip
    (arXiv 1912.09729).

    With proximal log-probs of the step's start and a behaviour correction outside, this is decoupled PPO.
    """
    return clipped(tokens.advantages, ratio(tokens.logprobs, tokens.proximal_logprobs), config)


def clipped(a: torch.Tensor, r: torch.Tensor, config: AlgorithmConfig) -> PolicyLoss:
    """PPO's surrogate for advantages and ratios. [N], [N]"""
    low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
    surrogate = torch.maximum(-a * r, -a * r.clamp(low, high))
    return PolicyLoss(
        token_loss=torch.where(a < 0, torch.minimum(surrogate, -a * config.clip_ratio_c), surrogate),
        indicators={
            "clip_fraction_high": (a > 0) & (r > high),
            "clip_fraction_low": (a < 0) & (r < low),
            "clip_fraction_dual": (a < 0) & (r > config.clip_ratio_c),
        },
    )


@policy_loss(
    formula="ppo with r = (product of the trajectory's ratios)^(1 / length)",
    paper="2507.18071",
    weighs_trajectories=True,
    defaults={"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean"},
)
def gspo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """PPO's clip around the geometric mean of a trajectory's ratios, whose gradient every token shares (GSPO, in its
    token form: the value is the trajectory's, the gradient the token's own)."""
    of_row = row_mean(tokens.logprobs.detach() - tokens.proximal_logprobs, tokens.row)
    own = tokens.logprobs - tokens.logprobs.detach()
    return clipped(tokens.advantages, (of_row + own).clamp(max=LARGEST_LOG_RATIO).exp(), config)


@policy_loss(
    formula="gspo, summed over a trajectory's tokens: times its length",
    paper="2602.05261",
    weighs_trajectories=True,
    defaults={"clip_ratio_low": 2e-3, "clip_ratio_high": 2.5e-3, "loss_agg_mode": "seq-mean-token-sum"},
)
def luspo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """GSPO whose trajectories weigh as much as they are long (LUSPO)."""
    return gspo(tokens, config)


@policy_loss(
    formula="-A exp(mean of log r, each clipped to [-low, high] where that lowers the objective)",
    paper="2507.20673",
    weighs_trajectories=True,
    defaults={"clip_ratio_low": 0.4, "clip_ratio_high": 0.4, "loss_agg_mode": "seq-mean-token-mean"},
)
def gmpo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Geometric mean of a trajectory's ratios, each token's clipped in log space on its optimistic side (GMPO).

    Every token of a trajectory has the trajectory's loss, so that its mean is that loss.
    """
    x, sign = log_ratio(tokens.logprobs, tokens.proximal_logprobs), tokens.advantages.sign()
    bounded = x.clamp(-config.clip_ratio_low, config.clip_ratio_high)
    used = sign * torch.minimum(sign * x, sign * bounded)
    used = torch.where(sign == 0, x, used)
    of_row = row_mean(used, tokens.row).exp()
    return PolicyLoss(
        -row_mean(tokens.advantages, tokens.row) * of_row, {"clip_fraction": (used != x) & (tokens.advantages != 0)}
    )


@policy_loss(formula="-A log p", paper="2504.02546", defaults={"proximal": "target"})
def gpg(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Policy gradient without ratio or clip (GPG; REINFORCE). The correction's weight is outside."""
    return PolicyLoss(-tokens.advantages * tokens.logprobs, {})


@policy_loss(
    formula="-sg[clip(r, 1 - low, 1 + high)] A log p",
    paper="2506.13585",
    defaults={"clip_ratio_low": 1.0, "clip_ratio_high": 0.28},
)
def cispo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Policy gradient weighted by the clipped ratio: no token loses its gradient (CISPO). A low of 1 is no bound."""
    r = ratio(tokens.logprobs.detach(), tokens.proximal_logprobs)
    low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
    outside = {"clip_fraction_high": r > high, "clip_fraction_low": r < low}
    return PolicyLoss(-r.clamp(low, high) * tokens.advantages * tokens.logprobs, outside)


@policy_loss(
    formula="-A 4/tau sigmoid(tau (r - 1)), tau by the sign of A",
    paper="2511.20347",
    defaults={"loss_agg_mode": "seq-mean-token-mean"},
)
def sapo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """A soft gate in place of PPO's clip: the gradient's weight is 1 at r = 1 and falls to both sides (SAPO)."""
    r = ratio(tokens.logprobs, tokens.proximal_logprobs)
    tau = torch.where(tokens.advantages > 0, config.sapo.tau_positive, config.sapo.tau_negative)
    return PolicyLoss(-tokens.advantages * 4 / tau * torch.sigmoid(tau * (r - 1)), {})


@policy_loss(
    formula="-A log p where A > 0, -sg[min(r, 1)] A log p where A < 0, r = p_target / p_behaviour",
    paper="2503.14286",
    weighs_behaviour=True,
)
def topr(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Right trajectories are imitated, wrong ones unlearnt as far as the policy still makes them (TOPR). r is a token's
    own ratio, as in ROLL; the paper's is the product over the trajectory."""
    r = ratio(tokens.logprobs.detach(), tokens.behaviour_logprobs)
    weight = torch.where(tokens.advantages > 0, 1.0, r.clamp(max=1.0))
    clipped_weight = (tokens.advantages < 0) & (r > 1)
    return PolicyLoss(-weight * tokens.advantages * tokens.logprobs, {"clip_fraction": clipped_weight})


@policy_loss(
    formula="-A log p + tau/2 (log r)^2, r = p_target / p_behaviour",
    paper="2501.12599",
    weighs_behaviour=True,
)
def kimi(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Policy gradient with a squared log-ratio that keeps the policy near the one that sampled (Kimi k1.5). The square
    is of a token's own log-ratio, as in ROLL; the paper's is of the trajectory's, the sum over its tokens."""
    log_r = log_ratio(tokens.logprobs, tokens.behaviour_logprobs)
    return PolicyLoss(-tokens.advantages * tokens.logprobs + config.kimi_tau / 2 * log_r**2, {})


@policy_loss(
    formula="-sg[phi(W)] A log p, phi(W) = W^k exp(l - l W), W = product of the trajectory's p_target / p_behaviour",
    paper="2602.10693",
    weighs_behaviour=True,
    weighs_trajectories=True,
)
def vespo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Policy gradient with a soft gate on a trajectory's whole ratio, sharper above 1 where A >= 0 (VESPO)."""
    w = sequence_ratio(tokens.logprobs.detach() - tokens.behaviour_logprobs, tokens.row)
    good = tokens.advantages >= 0
    k, rate = torch.where(good, 2.0, 3.0), torch.where(good, 3.0, 2.0)
    gate = (rate + k * w.log() - rate * w).exp()
    return PolicyLoss(-gate * tokens.advantages * tokens.logprobs, {})


@policy_loss(
    formula="ppo where A < 0; where A > 0 the gradient's weight is min(1/r, c), 0 above 1 + high",
    paper="2510.06062",
)
def aspo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """PPO with the ratio of good tokens turned over: those that the policy already likes weigh less (ASPO).

    The gradient is what is flipped, so the test is one of gradients: the value of 1/r has the wrong sign of it.
    """
    plain, a = ppo(tokens, config), tokens.advantages
    r = ratio(tokens.logprobs.detach(), tokens.proximal_logprobs)
    weight = torch.where(r > 1 + config.clip_ratio_high, 0.0, (1 / r).clamp(max=config.clip_ratio_c))
    flipped = -a * weight * (1 + tokens.logprobs - tokens.logprobs.detach())
    return PolicyLoss(torch.where(a > 0, flipped, plain.token_loss), plain.indicators)


@policy_loss(
    formula="-r A where |p_target - p_behaviour| is small, + tau (log r)^2",
    paper="2602.04879",
    weighs_behaviour=True,
)
def dppo(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """-r A without a clip, r = pi_target / pi_behaviour, where the token's probability has not moved too far (DPPO with
    total variation), and kl_tau (log r)^2 at every token: where it is dropped, that term alone leads back. It uses no
    proximal policy."""
    log_r = log_ratio(tokens.logprobs, tokens.behaviour_logprobs)
    dropped = total_variation_exceeded(tokens, config.dppo.delta_low, config.dppo.delta_high)
    surrogate = torch.where(dropped, 0.0, -tokens.advantages * log_r.exp())
    return PolicyLoss(surrogate + config.dppo.kl_tau * log_r**2, {"clip_fraction_dppo": dropped})


@policy_loss(
    formula="ppo, without gradient at a few random tokens of high covariance of A and log p",
    paper="2505.22617",
    marks="random_covariance",
    defaults={"clip_ratio_low": 1.0, "clip_ratio_high": 1.0},
)
def clip_cov(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """PPO whose marked tokens give no gradient: those that would cost the most entropy (Clip-Cov).

    They are drawn before the batch's first update, where r is 1 and no token is clipped. The authors' code draws for
    each update, among tokens that the clip leaves; here a marked token that is clipped later still counts as marked.
    """
    assert tokens.marked is not None
    plain = ppo(tokens, config)
    loss = torch.where(tokens.marked, 0.0, plain.token_loss)
    return PolicyLoss(loss, {**plain.indicators, "clip_fraction_covariance": tokens.marked})


@policy_loss(
    formula="-A r, + c |log r| at the tokens of highest covariance of A and log p",
    paper="2505.22617",
    marks="top_covariance",
)
def kl_cov(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Surrogate without a clip, with a penalty at the tokens that would cost the most entropy (KL-Cov)."""
    assert tokens.marked is not None
    log_r = log_ratio(tokens.logprobs, tokens.proximal_logprobs)
    loss = -tokens.advantages * log_r.exp()
    penalty = config.covariance.kl_coef * log_r.abs()
    return PolicyLoss(torch.where(tokens.marked, loss + penalty, loss), {"clip_fraction_covariance": tokens.marked})


@dataclass(frozen=True)
class PerceptionLoss:
    token_loss: torch.Tensor
    """[n]"""
    kl: torch.Tensor
    """[n] k3 estimate of KL(policy || policy with masked images)."""


def perception_loss(
    logprobs: torch.Tensor,
    masked_logprobs: torch.Tensor,
    entropies: torch.Tensor | None,
    masked_entropies: torch.Tensor | None,
    config: PapoConfig,
) -> PerceptionLoss:
    """-kl_coef KL(policy || policy with masked images) + entropy_coeff (both entropies): PAPO (arXiv 2507.06448, eq. 4
    and the double entropy loss). [n] each, with gradient on both sides, as in the paper's formula; the authors' code
    detaches the masked side by default. A token's KL is cut at LARGEST_PERCEPTION_KL, where it gives no gradient."""
    difference = masked_logprobs - logprobs
    kl = (ratio(masked_logprobs, logprobs) - difference - 1).clamp(max=LARGEST_PERCEPTION_KL)
    token_loss = -config.kl_coef * kl
    if entropies is not None and masked_entropies is not None:
        token_loss = token_loss + config.entropy_coeff * (entropies + masked_entropies)
    return PerceptionLoss(token_loss, kl)


@dataclass(frozen=True)
class ValueLoss:
    token_loss: torch.Tensor
    """[n]"""
    clipped: torch.Tensor
    """[n] bool: the clip decided."""


def value_loss(values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float) -> ValueLoss:
    """Half the squared error of a critic (PPO, arXiv 1707.06347), the larger of plain and clipped.

    Values that have left [old - clip_range, old + clip_range] on the way to their return get no gradient. [n] each; a
    clip_range of 0 clips nothing.
    """
    plain = (values - returns) ** 2
    if not clip_range:
        return ValueLoss(0.5 * plain, torch.zeros_like(plain, dtype=torch.bool))
    near = (old_values + (values - old_values).clamp(-clip_range, clip_range) - returns) ** 2
    return ValueLoss(0.5 * torch.maximum(plain, near), near > plain)


def token_weights(
    row: torch.Tensor, mode: str, *, max_response_length: int, group: torch.Tensor | None = None
) -> torch.Tensor:
    """[N] weight of each trainable token of the whole update; `row` [N] is its trajectory, `group` [N] its group.

    token-mean: 1/N. seq-mean-token-mean: 1/(rows * length of the row). seq-mean-token-sum: 1/rows.
    seq-mean-token-sum-norm: 1/(rows * max_response_length) (Dr. GRPO, arXiv 2503.20783). prompt-mean:
    1/(groups * tokens of the group). Rows without trainable tokens do not count.

    The weights are fixed before the batch is cut into micro-batches: the loss is a plain sum and does not depend on
    micro-batching, packing or the number of learners.
    """
    if mode == "token-mean":
        return torch.full(row.shape, 1.0 / max(len(row), 1))
    if mode == "prompt-mean":
        assert group is not None
        row, mode = group, "seq-mean-token-mean"  # the same, of groups
    lengths = torch.bincount(row)
    rows = max(int((lengths > 0).sum()), 1)
    if mode == "seq-mean-token-mean":
        return 1.0 / (rows * lengths[row].float())
    if mode == "seq-mean-token-sum":
        return torch.full(row.shape, 1.0 / rows)
    if mode == "seq-mean-token-sum-norm":
        return torch.full(row.shape, 1.0 / (rows * max_response_length))
    raise ValueError(f"unknown loss_agg_mode {mode!r}")


def update_weights(
    row: torch.Tensor, group: torch.Tensor, inserted: torch.Tensor, config: AlgorithmConfig, *, max_response_length: int
) -> torch.Tensor:
    """[N] weight of each trained token of the whole update: `loss_agg_mode` of what was sampled, and for the others
    (`inserted` [N] bool) the mean over themselves, unless the policy loss shares one denominator between them."""
    loss = method_of("policy_loss", config.policy_loss)
    apart = torch.zeros_like(inserted) if loss and loss.shares_denominator else inserted
    weights = torch.full(row.shape, 1.0 / max(int(apart.sum()), 1))
    weights[~apart] = token_weights(
        row[~apart], config.loss_agg_mode, group=group[~apart], max_response_length=max_response_length
    )
    return weights
