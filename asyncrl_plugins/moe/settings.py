"""Settings for models of experts. No torch."""

from __future__ import annotations

from pydantic import Field

from asyncrl.config.sections import Section


class RoutingReplayConfig(Section):
    """Experts that the engine chose, chosen again in the learner (R3, arXiv 2510.11370). The section has no keys: its
    presence, `algorithm.routing_replay={}`, is the choice."""


class RouterLossesConfig(Section):
    """Losses of the routers over all tokens of a step, prompts included, and the load of the experts."""

    balance_coef: float = Field(default=0.001, ge=0)
    """Weight of the load-balancing loss as transformers computes it (`router_aux_loss_coef` of a model's config.json):
    the number of a token's experts where the load is even, and more elsewhere. metrics.jsonl has it as
    `router/balance_loss`."""
    z_coef: float = Field(default=0.0, ge=0)
    """Weight of the z-loss, mean of logsumexp² of the routers' logits (ST-MoE, arXiv 2202.08906: 0.001). metrics.jsonl
    has it as `router/z_loss`."""
