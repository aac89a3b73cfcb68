"""Rows of the research methods: the entry `methods` of the entry point group `asyncrl.methods`. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.method import Method, MethodSet
from asyncrl_plugins.methods.settings import (
    CppoConfig,
    DppoConfig,
    GigpoConfig,
    GpgConfig,
    KimiConfig,
    KlCovConfig,
    MtGrpoConfig,
    PassKConfig,
    RandomCovarianceConfig,
    SapoConfig,
    SsbConfig,
    TopCovarianceConfig,
)

if TYPE_CHECKING:
    from asyncrl.config.schema import RunConfig


def pass_k_problems(config: RunConfig) -> Iterator[str]:
    size, k = config.batch.group_size, config.algorithm.settings_of(PassKConfig).k
    if size < k:
        yield (
            f"batch.group_size is {size}: passk_training needs at least {k} completions per prompt "
            f"(algorithm.passk_training.k) to compute an advantage. Set batch.group_size={max(8, k)}"
        )


ADVANTAGES = {
    "reinforce_plus_plus_baseline": Method(
        "asyncrl_plugins.methods.advantages:reinforce_plus_plus_baseline",
        formula="whitened (s - mean_group)",
        paper="2501.03262",
        compares_rows=True,
    ),
    "opo": Method(
        "asyncrl_plugins.methods.advantages:opo",
        formula="s - sum(l s) / sum(l) over the group, l the length",
        paper="2505.23585",
        compares_rows=True,
    ),
    "gpg": Method(
        "asyncrl_plugins.methods.advantages:gpg",
        formula="B / (rows of groups with spread) * (s - mean_group)",
        paper="2504.02546",
        settings=GpgConfig,
        defaults={"norm_adv_by_std": False, "policy_loss": "gpg"},
        plain_scores=True,
        compares_rows=True,
    ),
    "lite_ppo": Method(
        "asyncrl_plugins.methods.advantages:lite_ppo",
        formula="(s - mean_group) / (std_batch + 1e-6)",
        paper="2508.08221",
        compares_rows=True,
    ),
    "maxrl": Method(
        "asyncrl_plugins.methods.advantages:maxrl",
        formula="(s - mean_group) / mean_group, 0 where the mean is not positive",
        paper="2602.02710",
        plain_scores=True,
        compares_rows=True,
    ),
    "grpo_passk": Method(
        "asyncrl_plugins.methods.advantages:grpo_passk",
        formula="(best - second) / (std_group + 1e-6) for the best row, else 0",
        paper="2503.19595",
        compares_rows=True,
    ),
    "passk_training": Method(
        "asyncrl_plugins.methods.advantages:passk_training",
        formula="(1 - R) / sigma for right rows, R = 1 - C(wrong, k) / C(n, k)",
        paper="2508.10751",
        settings=PassKConfig,
        plain_scores=True,
        problems=pass_k_problems,
    ),
    "optimal_token_baseline": Method(
        "asyncrl_plugins.methods.advantages:optimal_token_baseline",
        formula="G_t - sum_group(G_t W_t) / sum_group(W_t), W_t = sum_(t' <= t) w^2 (1 - 2 p + sum_v p_v^2), w the "
        "correction's weight",
        needs={"proximal", "squared_probabilities"},
        compares_rows=True,
    ),
    "step_reinforce": Method(
        "asyncrl_plugins.methods.turn_advantages:step_reinforce",
        formula="sum_k gamma^k R_(turn+k), normalised in the group",
        compares_rows=True,
    ),
    "agentic_reinforce": Method(
        "asyncrl_plugins.methods.turn_advantages:agentic_reinforce", formula="sum_k gamma^k R_(turn+k)"
    ),
    "turn_return": Method(
        "asyncrl_plugins.methods.turn_advantages:turn_return",
        formula="(G - mean) / (std + 1e-6) over the turns of that number in the group, over all where there is only "
        "one, G = sum_k gamma^k R_(turn+k)",
        needs={"turns"},
        compares_rows=True,
    ),
    "gigpo": Method(
        "asyncrl_plugins.methods.turn_advantages:gigpo",
        formula="grpo + w (G - mean) / (std + 1e-6) over the group's turns from the same state, "
        "G = sum_k gamma^k R_(turn+k)",
        paper="2505.10978",
        needs={"turns"},
        settings=GigpoConfig,
        defaults={"gamma": 0.95},
        compares_rows=True,
    ),
    "mt_grpo": Method(
        "asyncrl_plugins.methods.turn_advantages:mt_grpo",
        formula="grpo of the outcomes + w (R - mean) / (std + 1e-6) over the turns of that number in the group",
        paper="2505.11821",
        needs={"turns"},
        settings=MtGrpoConfig,
        plain_scores=True,
        compares_rows=True,
    ),
}
POLICY_LOSSES = {
    "dppo": Method(
        "asyncrl_plugins.methods.losses:dppo",
        formula="-min(r, upper) A where |p_target - p_behaviour| is small, + tau (log r)^2",
        paper="2602.04879",
        weighs_behaviour=True,
        settings=DppoConfig,
    ),
    "gmpo": Method(
        "asyncrl_plugins.methods.losses:gmpo",
        formula="-A exp(mean of log r, each clipped to [-low, high] where that lowers the objective)",
        paper="2507.20673",
        weighs_trajectories=True,
        defaults={"clip_ratio_low": 0.4, "clip_ratio_high": 0.4, "loss_agg_mode": "seq-mean-token-mean"},
    ),
    "sapo": Method(
        "asyncrl_plugins.methods.losses:sapo",
        formula="-A 4/tau sigmoid(tau (r - 1)), tau by the sign of A",
        paper="2511.20347",
        settings=SapoConfig,
        defaults={"loss_agg_mode": "seq-mean-token-mean"},
    ),
    "luspo": Method(
        "asyncrl_plugins.methods.losses:luspo",
        formula="gspo, summed over a trajectory's tokens: times its length",
        paper="2602.05261",
        weighs_trajectories=True,
        defaults={"clip_ratio_low": 2e-3, "clip_ratio_high": 2.5e-3, "loss_agg_mode": "seq-mean-token-sum"},
    ),
    "topr": Method(
        "asyncrl_plugins.methods.losses:topr",
        formula="-A log p where A > 0, -sg[min(r, 1)] A log p where A < 0, r = p_target / p_behaviour",
        paper="2503.14286",
        weighs_behaviour=True,
    ),
    "kimi": Method(
        "asyncrl_plugins.methods.losses:kimi",
        formula="-A log p + tau/2 (log r)^2, r = p_target / p_behaviour",
        paper="2501.12599",
        weighs_behaviour=True,
        settings=KimiConfig,
    ),
    "vespo": Method(
        "asyncrl_plugins.methods.losses:vespo",
        formula="-sg[phi(W)] A log p, phi(W) = W^k exp(l - l W), W = product of the trajectory's p_target / "
        "p_behaviour",
        paper="2602.10693",
        weighs_behaviour=True,
        weighs_trajectories=True,
    ),
    "aspo": Method(
        "asyncrl_plugins.methods.losses:aspo",
        formula="ppo where A < 0; where A > 0 the gradient's weight is min(1/r, c), 0 above 1 + high",
        paper="2510.06062",
    ),
    "clip_cov": Method(
        "asyncrl_plugins.methods.losses:clip_cov",
        formula="ppo, without gradient at a few random tokens of high covariance of A and log p",
        paper="2505.22617",
        marks="random_covariance",
        defaults={"clip_ratio_low": 1.0, "clip_ratio_high": 1.0},
    ),
    "kl_cov": Method(
        "asyncrl_plugins.methods.losses:kl_cov",
        formula="-A r, + c |log r| at the tokens of highest covariance of A and log p",
        paper="2505.22617",
        marks="top_covariance",
        settings=KlCovConfig,
    ),
}
SELECTIONS = {
    "cppo": Method(
        "asyncrl_plugins.methods.selections:cppo",
        formula="all but the floor(n (1 - prune)) trajectories of largest |A| in each group of n",
        paper="2503.22342",
        takes_from="batch",
        settings=CppoConfig,
    ),
    "top_covariance": Method(
        "asyncrl_plugins.methods.selections:top_covariance",
        formula="the tokens of highest (A - mean A) (log p - mean log p)",
        paper="2505.22617",
        needs={"proximal"},
        takes_from="policy_loss",
        settings=TopCovarianceConfig,
    ),
    "random_covariance": Method(
        "asyncrl_plugins.methods.selections:random_covariance",
        formula="random tokens with lower < (A - mean A) (log p - mean log p) < upper",
        paper="2505.22617",
        needs={"proximal"},
        takes_from="policy_loss",
        settings=RandomCovarianceConfig,
    ),
}


def ssb_problems(config: RunConfig) -> Iterator[str]:
    """Name what leaves the replay buffer nothing to do, with its fix."""
    if not config.algorithm.filters:
        yield (
            "algorithm.ssb is chosen, and no group is dropped whose place another one could take. Set "
            "algorithm.filters=[zero_variance], or leave it out"
        )
    if not config.learner.max_staleness:
        yield (
            "algorithm.ssb is chosen, but learner.max_staleness is 0: groups of earlier steps were sampled by older "
            "versions, and their tokens are over that bound. Set learner.max_staleness=4, or leave it out"
        )
    if config.batch.prompts_per_step < 2:
        yield (
            "algorithm.ssb is chosen, but batch.prompts_per_step is 1, and every step trains a new group. Raise the "
            "latter, or leave the former out"
        )


REPLAY_BUFFERS = {
    "ssb": Method(
        "asyncrl_plugins.methods.replay_buffer:Ssb",
        formula="a trained group takes a filtered one's place, drawn in proportion to mean |s - mean_group|",
        paper="2504.16656",
        settings=SsbConfig,
        problems=ssb_problems,
    )
}
METHODS = MethodSet(
    advantages=ADVANTAGES,
    policy_losses=POLICY_LOSSES,
    selections=SELECTIONS,
    replay_buffers=REPLAY_BUFFERS,
    overlays=Path(__file__).parent / "overlays",
)
