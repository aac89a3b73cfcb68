"""Rows of the methods: an entry of the entry point group `asyncrl.methods`. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.method import Method, MethodSet
from asyncrl_plugins.perception.settings import NoisyRolloutConfig, PapoConfig

if TYPE_CHECKING:
    from asyncrl.config.schema import RunConfig


def noise_problems(config: RunConfig) -> Iterator[str]:
    """Name the parts of a configuration that do not go with distorted images, each with its fix."""
    algorithm, settings = config.algorithm, config.algorithm.settings_of(NoisyRolloutConfig)
    left = config.sampled_per_group
    if not settings.number_of(left):
        yield (
            f"algorithm.noisy_rollout.share is {settings.share:g}, which is none of the {left} completions of a group "
            "that are sampled (batch.group_size without what is inserted whole). Set it to 0.5, and "
            "batch.group_size so that two are sampled at least"
        )
    if algorithm.proximal != "recompute":
        yield (
            f"algorithm.noisy_rollout is chosen, and algorithm.proximal {algorithm.proximal} uses log-probs of the "
            "engine, which saw other images. Set algorithm.proximal=recompute"
        )
    if config.environment.is_used:
        yield "algorithm.noisy_rollout: an environment does not know of other images. Leave it out"


METHODS = MethodSet(
    ticket_hooks={
        "noisy_rollout": Method(
            "asyncrl_plugins.perception.noisy_images:NoisyRollout",
            formula="a share of each group sees distorted images, all are trained on the clean ones",
            paper="2504.13055",
            needs={"total_steps"},
            settings=NoisyRolloutConfig,
            problems=noise_problems,
        )
    },
    loss_hooks={
        "papo": Method(
            "asyncrl_plugins.perception.papo:Papo",
            formula="-kl_coef KL(policy || policy with masked images) + entropy_coeff (both entropies)",
            paper="2507.06448",
            settings=PapoConfig,
        )
    },
    overlays=Path(__file__).parent / "overlays",
)
