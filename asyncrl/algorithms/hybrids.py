"""Policy losses that learn from demonstrations beside what the policy sampled.

`tokens.provenance.is_inserted` marks the tokens of demonstrations and hints. No policy sampled them: they have no
ratio, correction, entropy bonus or KL, and no part in their group's statistics, unless a method says that it credits
demonstrations. Their mean has a denominator of its own, unless a method says that all tokens share one.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.losses import PolicyLoss, ppo
from asyncrl.algorithms.ratios import PolicyTokens, ratio, row_mean
from asyncrl.algorithms.registration import policy_loss, selection
from asyncrl.algorithms.trajectories import Credit, Trajectories
from asyncrl.config.algorithm import AlgorithmConfig


@policy_loss(
    formula="(1 - mu) ppo + mu mean(-w log p over demonstrations), mu by the step, w = 1",
    paper="2508.11408",
    needs=("demonstrations",),
    defaults={"demonstrations": {"rows": 1}},
)
def chord_mu(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """PPO and imitation, whose weight mu rises, falls and stays small (CHORD-mu). A demonstration in each group stands
    in for the paper's batches of expert rows from other prompts; it has no advantage."""
    mu, p = config.chord.mu(tokens.version), tokens.logprobs.detach().exp()
    weighting = {"none": torch.ones_like(p), "phi": p * (1 - p), "probability": p}[config.chord.weighting]
    return _imitating(tokens, ppo(tokens, config), mu * weighting, share=1 - mu)


@policy_loss(
    formula="chord_mu with w = p (1 - p) and a constant mu",
    paper="2508.11408",
    needs=("demonstrations",),
    defaults={
        "demonstrations": {"rows": 1},
        "chord": {"weighting": "phi", "peak": 0.1, "valley": 0.1, "warmup_steps": 0, "decay_steps": 0},
    },
)
def chord_phi(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """CHORD-mu that learns most from tokens of which the policy is neither sure nor ignorant (CHORD-phi). The constant
    mu is reconstructed, not read in the paper."""
    return chord_mu(tokens, config)


@policy_loss(
    formula="-A r, for demonstrations -A p / (p + gamma)",
    paper="2504.14945",
    needs=("demonstrations",),
    credits_demonstrations=True,
    shares_denominator=True,
    defaults={
        "demonstrations": {"rows": 1},
        "norm_adv_by_std": False,
        "loss_agg_mode": "seq-mean-token-sum-norm",
        "entropy_coeff": 0.01,
    },
)
def luffy(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Demonstrations as members of their group, scored as it is, with the behaviour's probability taken for 1 and a
    shape that favours their unlikely tokens (LUFFY). Sampled tokens are not clipped."""
    assert tokens.provenance is not None
    of_sampled = -tokens.advantages * ratio(tokens.logprobs, tokens.proximal_logprobs)
    p, gamma = tokens.logprobs.exp(), config.luffy_gamma
    slope = (tokens.advantages * gamma * p / (p + gamma) ** 2).detach()
    of_inserted = -tokens.advantages * p / (p + gamma)
    return PolicyLoss(torch.where(tokens.provenance.is_inserted, of_inserted, of_sampled), {}, supervised_weight=slope)


@policy_loss(
    formula="ppo + coef mean(-log p over hints)",
    paper="2505.16984",
    needs=("demonstrations",),
    defaults={"demonstrations": {"hints": {"segments": 5}}},
)
def uft(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """PPO on completions that begin with a hint, and imitation of the hint itself (UFT). Hints get shorter, and end
    (`algorithm.demonstrations.hints`); their number and steps are those of the authors' script, the first and the last
    probability are reconstructed."""
    return _imitating(tokens, ppo(tokens, config), torch.full_like(tokens.advantages, config.uft_coef))


@policy_loss(
    formula="ppo, or coef (-log p of the demonstration) for groups with no more than the gate's share of right rows",
    paper="2509.04419",
    needs=("demonstrations",),
    shares_denominator=True,
    defaults={"demonstrations": {"rows": 1}, "selections": ["success_gate"], "loss_agg_mode": "prompt-mean"},
)
def hpt(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Each group learns from what it sampled or from its demonstration, never from both (HPT, hard gate). The selection
    `success_gate` decides; each prompt counts the same."""
    return _imitating(tokens, ppo(tokens, config), torch.full_like(tokens.advantages, config.hpt.coef))


@selection(
    formula="demonstrations of groups whose share of right rows is above the gate, sampled rows of the others",
    paper="2509.04419",
    needs=("demonstrations",),
    takes_from="batch",
)
def success_gate(t: Trajectories, credit: Credit, config: AlgorithmConfig) -> torch.Tensor:
    """Mask [N] of the tokens that HPT leaves out of a group's policy loss. A row is right if its score is
    `algorithm.success_score` or above; groups without a demonstration keep what they sampled."""
    if t.provenance is None:
        return torch.zeros_like(t.row, dtype=torch.bool)
    inserted, rows, groups = t.provenance.is_inserted, len(t.scores), int(t.group.max()) + 1 if len(t.group) else 0
    is_demonstration = torch.zeros(rows, dtype=torch.bool)
    is_demonstration[t.row[inserted]] = True
    sampled = (t.lengths > 0) & ~is_demonstration & ~t.scores.isnan()
    right = sampled & (t.scores >= config.success_score)
    count = torch.zeros(3, groups, dtype=torch.long)
    for line, chosen in zip(count, (sampled, right, is_demonstration & (t.lengths > 0)), strict=True):
        line.index_add_(0, t.group, chosen.long())
    passed = (count[1] > config.hpt.gate * count[0]) | (count[2] == 0)
    return torch.where(passed[t.group[t.row]], inserted, ~inserted)


@policy_loss(
    formula="c_s exp(-H) (-log p) - A p for demonstrations; -c_r exp(H) log p where right, else +log p",
    paper="2506.19767",
    needs=("demonstrations",),
    credits_demonstrations=True,
    defaults={"demonstrations": {"rows": 1}, "proximal": "target"},
)
def srft(tokens: PolicyTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Imitation and off-policy gradient of demonstrations, and rewards of +1 and -1 for what was sampled, weighed by
    the mean entropy H of each row (SRFT). A row is right if its score is `algorithm.success_score` or above."""
    assert tokens.provenance is not None
    assert tokens.entropies is not None
    assert tokens.scores is not None
    logprobs, settings = tokens.logprobs, config.srft
    entropy = row_mean(tokens.entropies, tokens.row)
    imitation = settings.supervised_coef * (-entropy).exp()
    # The ratio to a behaviour policy that is taken for certain: p / 1.
    of_inserted = -imitation * logprobs - tokens.advantages * logprobs.exp()
    right = tokens.scores >= config.success_score
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
