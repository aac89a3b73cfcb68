"""Rows of the methods: an entry of the entry point group `asyncrl.methods`. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.config.installed_methods import chosen_hooks
from asyncrl.config.method import Method, MethodSet
from asyncrl.config.parts import ANY_TRACE, ROLLOUT_ENGINES
from asyncrl.errors import UserError
from asyncrl.model_files.folder import read_config, text_part
from asyncrl_plugins.moe.settings import RouterLossesConfig, RoutingReplayConfig
from asyncrl_plugins.moe.shape import ExpertShape

if TYPE_CHECKING:
    from asyncrl.config.schema import RunConfig

REPLAY = "routing_replay"
LOSSES = "router_losses"


def expert_problems(config: RunConfig, name: str) -> Iterator[str]:
    try:
        shape = ExpertShape.of(text_part(read_config(config.model)))
    except UserError:  # the folder's own check says why
        return
    if shape is None:
        yield (
            f"algorithm.{name} is chosen, and the config.json in {config.model.path} names no experts (num_experts, "
            f"num_experts_per_tok). Leave algorithm.{name} out, or use a model of experts"
        )


def replay_problems(config: RunConfig) -> Iterator[str]:
    """Name the parts of a configuration without recorded experts, each with its fix."""
    yield from expert_problems(config, REPLAY)
    engine = config.rollout.engine
    if not ROLLOUT_ENGINES[engine].traces & {REPLAY, ANY_TRACE}:
        having = [name for name, part in ROLLOUT_ENGINES.all().items() if part.traces & {REPLAY, ANY_TRACE}]
        yield (
            f"algorithm.{REPLAY} is chosen, and rollout.engine {engine} does not say which experts it chose. Set "
            f"rollout.engine to one of {', '.join(having)}, or leave algorithm.{REPLAY} out"
        )
    if config.environment.is_used:
        yield (
            f"algorithm.{REPLAY} is chosen, and experts are not recorded over the turns of an environment. Leave "
            f"algorithm.{REPLAY} or environment.name out"
        )
    if config.learner.num_processes > 1:
        yield (
            f"algorithm.{REPLAY} is chosen, and learner.num_processes is {config.learner.num_processes}: replay has "
            f"not run with ranks. Set learner.num_processes=1, or leave algorithm.{REPLAY} out"
        )
    for name, (method, _) in chosen_hooks("ticket_hook", config.algorithm).items():
        if method.inserts is not None:
            yield (
                f"algorithm.{REPLAY} is chosen, and no engine computes the completions that algorithm.{name} inserts "
                "whole. Leave one of them out"
            )


def loss_problems(config: RunConfig) -> Iterator[str]:
    return expert_problems(config, LOSSES)


def replay_bytes(config: RunConfig) -> int:
    """Bytes of a token's experts; 0 where the model has none, or cannot be read."""
    try:
        shape = ExpertShape.of(text_part(read_config(config.model)))
    except UserError:
        return 0
    return shape.width if shape else 0


METHODS = MethodSet(
    loss_hooks={
        LOSSES: Method(
            "asyncrl_plugins.moe.losses:RouterLosses",
            formula="balance_coef E sum_e f_e P_e + z_coef mean logsumexp(logits)^2",
            paper="2202.08906",
            settings=RouterLossesConfig,
            problems=loss_problems,
        )
    },
    token_traces={
        REPLAY: Method(
            "asyncrl_plugins.moe.replay:RoutingReplay",
            formula="the engine's experts of each token, weighed by the learner's router",
            paper="2510.11370",
            settings=RoutingReplayConfig,
            problems=replay_problems,
            bytes_per_token=replay_bytes,
        )
    },
)
