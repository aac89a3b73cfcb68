"""Methods of the core: name -> row, one dict for each choice of the `algorithm` section; their own settings first.

A new method is a function and a row here, or in the `MethodSet` of a plug-in (docs/plugins.md). docs/algorithms.md is
written from the rows and the functions' docstrings. No row imports torch: configurations are checked without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field, model_validator

from asyncrl.config.method import Method, MethodSet
from asyncrl.config.sections import Section
from asyncrl.errors import METHOD_OVERLAYS


class GaeConfig(Section):
    """`adv_estimator: gae` (arXiv 1506.02438)."""

    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of the policy's advantages."""
    critic_lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of the critic's targets (VC-PPO, arXiv 2503.01491)."""
    length_alpha: float = Field(default=0.0, ge=0)
    """Above 0 the policy's lambda is 1 - 1 / (length_alpha * length), not `lam` (VAPO, arXiv 2504.05118: 0.05)."""
    whiten: bool = True
    """Give the advantages of a batch mean 0 and variance 1."""


class M2poConfig(Section):
    """`selections: [m2po]` (arXiv 2510.01161)."""

    threshold: float = Field(default=0.04, gt=0)
    """Largest mean squared log-ratio of proximal and behaviour policy that is left."""


class TopEntropyConfig(Section):
    """`selections: [top_entropy]` (arXiv 2506.01939)."""

    fraction: float = Field(default=0.2, gt=0, le=1)
    """Share of the batch's tokens, highest entropy first, that keep their policy loss."""


class ZeroVarianceConfig(Section):
    """`filters: [zero_variance]` (DAPO's dynamic sampling, arXiv 2503.14476)."""

    component: str = ""
    """Component of the reward that is taken for the score: its name, or `accuracy` for the one that is reported as
    accuracy (`reward.accuracy`); empty means the reward itself."""
    low: float | None = None
    """Groups whose mean score is not above this are dropped, too. Nothing means no bound."""
    high: float | None = None
    """Groups whose mean score is not below this are dropped, too. Nothing means no bound."""

    @model_validator(mode="after")
    def _leaves_a_group(self) -> ZeroVarianceConfig:
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(
                f"algorithm.zero_variance.low ({self.low:g}) must be below algorithm.zero_variance.high "
                f"({self.high:g}), or no group is left"
            )
        return self


class EntropyControlConfig(Section):
    """Adaptive `algorithm.entropy_coeff` (arXiv 2505.22312)."""

    target: float = Field(default=0.0, ge=0)
    """Entropy in nats per token. After a step at or below it the coefficient grows and the next step has the bonus;
    after any other step the coefficient falls and there is no bonus. 0 is off: the coefficient is fixed."""
    delta: float = Field(default=0.005, gt=0)
    """Change of the coefficient by one step, within 0 and 1."""


ACCURACY = "accuracy"
"""Name that means the component of `reward.accuracy`, unless a component has that very name."""


def gdpo_problems(config: Any) -> Iterator[str]:
    if not config.reward.component_names:
        yield (
            "algorithm.adv_estimator gdpo normalises each component of the reward by itself, and reward.functions is "
            "empty. Name functions there, or choose grpo"
        )


def zero_variance_problems(config: Any) -> Iterator[str]:
    component, components = config.algorithm.settings_of(ZeroVarianceConfig).component, config.reward.component_names
    if component and component not in (*components, ACCURACY):
        there = f"the components of the reward are {', '.join(components)}" if components else "there are none"
        yield f"algorithm.zero_variance.component is {component!r}, but {there} (reward.functions)"
    if config.batch.group_size < 2:
        yield (
            f"batch.group_size is {config.batch.group_size}: the filter zero_variance would drop every group. "
            "Set batch.group_size=8"
        )


ADVANTAGES = {
    "grpo": Method(
        "asyncrl.algorithms.advantages:grpo",
        formula="(s - mean_group) / (std_group + 1e-6)",
        paper="2402.03300",
        compares_rows=True,
    ),
    "dr_grpo": Method(
        "asyncrl.algorithms.advantages:dr_grpo",
        formula="s - mean_group",
        paper="2503.20783",
        defaults={"norm_adv_by_std": False, "loss_agg_mode": "seq-mean-token-sum-norm"},
        compares_rows=True,
    ),
    "rloo": Method(
        "asyncrl.algorithms.advantages:rloo",
        formula="s - mean of the others in the group",
        paper="2402.14740",
        compares_rows=True,
    ),
    "gdpo": Method(
        "asyncrl.algorithms.advantages:gdpo",
        formula="z over the batch of sum_k w_k (s_k - mean_group) / (std_group + 1e-4)",
        paper="2601.05242",
        plain_scores=True,
        compares_rows=True,
        problems=gdpo_problems,
    ),
    "gae": Method(
        "asyncrl.algorithms.token_advantages:gae",
        formula="sum_k (gamma lambda)^k delta_(t+k), delta_t = r_t + gamma V_(t+1) - V_t",
        paper="1506.02438",
        needs={"critic"},
        settings=GaeConfig,
    ),
    "reinforce_plus_plus": Method(
        "asyncrl.algorithms.token_advantages:reinforce_plus_plus",
        formula="whitened sum_k gamma^k r_(t+k)",
        paper="2501.03262",
    ),
    "remax": Method(
        "asyncrl.algorithms.token_advantages:remax",
        formula="s - score of a greedy completion",
        paper="2310.10505",
        needs={"greedy_row"},
    ),
    "reinforce": Method("asyncrl.algorithms.token_advantages:reinforce", formula="sum_k gamma^k r_(t+k)"),
}
POLICY_LOSSES = {
    "ppo": Method(
        "asyncrl.algorithms.losses:ppo",
        formula="max(-A r, -A clip(r, 1 - low, 1 + high)), at most -A c where A < 0",
        paper="1707.06347",
    ),
    "gspo": Method(
        "asyncrl.algorithms.losses:gspo",
        formula="ppo with r = (product of the trajectory's ratios)^(1 / length)",
        paper="2507.18071",
        weighs_trajectories=True,
        defaults={"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean"},
    ),
    "gpg": Method(
        "asyncrl.algorithms.losses:gpg", formula="-A log p", paper="2504.02546", defaults={"proximal": "target"}
    ),
    "cispo": Method(
        "asyncrl.algorithms.losses:cispo",
        formula="-sg[clip(r, 1 - low, 1 + high)] A log p",
        paper="2506.13585",
        defaults={"clip_ratio_low": 1.0, "clip_ratio_high": 0.28},
    ),
}
SELECTIONS = {
    "m2po": Method(
        "asyncrl.algorithms.selections:m2po",
        formula="fewest tokens without which mean (log proximal - log behaviour)^2 < threshold",
        paper="2510.01161",
        needs={"proximal"},
        settings=M2poConfig,
    ),
    "overlong": Method(
        "asyncrl.algorithms.selections:overlong",
        formula="the tokens of trajectories without a stop token",
        paper="2503.14476",
        takes_from="batch",
    ),
    "top_entropy": Method(
        "asyncrl.algorithms.selections:top_entropy",
        formula="H < the batch's (1 - fraction) quantile of H, H the entropy at the token",
        paper="2506.01939",
        needs={"entropies"},
        takes_from="policy_loss",
        settings=TopEntropyConfig,
    ),
}
GROUP_FILTERS = {
    "zero_variance": Method(
        "asyncrl.algorithms.filters:zero_variance",
        formula="keep a group iff max s - min s > 1e-6, and low < mean s < high where these are set",
        paper="2503.14476",
        settings=ZeroVarianceConfig,
        problems=zero_variance_problems,
    ),
}
ADDITIONS = {
    "entropy_control": Method(
        "learner.training.controllers:EntropyController",
        formula="coefficient + delta after a step of entropy <= target, else - delta and no bonus",
        paper="2505.22312",
        settings=EntropyControlConfig,
    ),
}
METHODS = MethodSet(
    advantages=ADVANTAGES,
    policy_losses=POLICY_LOSSES,
    selections=SELECTIONS,
    group_filters=GROUP_FILTERS,
    additions=ADDITIONS,
    overlays=METHOD_OVERLAYS,
)
