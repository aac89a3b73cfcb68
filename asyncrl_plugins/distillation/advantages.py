"""Credit by a teacher: how much likelier it makes each token than the student does."""

from __future__ import annotations

from dataclasses import replace

from asyncrl.algorithms.advantages import grpo
from asyncrl.algorithms.trajectories import Credit, Trajectories
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl_plugins.distillation.settings import GkdConfig, OpdConfig


def opd(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """log teacher - log student at each token that the student has sampled, plus a share of GRPO's advantage.

    In the mean over samples this is the policy gradient of -KL(student || teacher) of each token by itself (on-policy
    distillation, arXiv 2306.13649, section 3; as a policy gradient: thinkingmachines.ai/blog/on-policy-distillation).
    The student is the policy at the start of the step; the correction weighs its samples.
    """
    assert t.proximal_logprobs is not None
    assert t.reference_logprobs is not None
    settings = config.settings_of(OpdConfig)
    distances = t.reference_logprobs - t.proximal_logprobs
    advantages = settings.teacher_weight * distances.clamp(min=-settings.largest, max=settings.largest)
    if settings.reward_weight:
        advantages = advantages + settings.reward_weight * grpo(t, config).advantages
    return Credit(advantages)


def gkd(t: Trajectories, config: AlgorithmConfig) -> Credit:
    """A share of GRPO's advantage; the teacher is in the loss, by the hook that compares distributions (generalised
    knowledge distillation, section 3: reinforcement learning and on-policy distillation together)."""
    credit = grpo(t, config)
    return replace(credit, advantages=config.settings_of(GkdConfig).reward_weight * credit.advantages)
