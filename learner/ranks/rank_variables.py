"""The rank of this process: from torchrun's environment, from the rank 0 that started it, or from the configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.config.schema import RunConfig
from asyncrl.config.service_sections import LearnerConfig
from asyncrl.errors import UserError

STORE_PORT = "ASYNCRL_RANKS_PORT"
"""The port of rank 0's store, in the environment of the ranks that it starts."""
ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
"""Variables that name rank 0's store to ranks that it has not started."""


@dataclass(frozen=True)
class RankVariables:
    rank: int
    size: int
    local_rank: int
    is_given: bool = False
    """True where torchrun has started all ranks, or rank 0 this one."""


def rank_of_service(variables: Mapping[str, str] = os.environ) -> int:
    """Rank of this process; 0 where neither a variable nor torchrun names one."""
    try:
        return _number(variables, "RANK", 0) if _number(variables, "WORLD_SIZE", 1) > 1 else 0
    except UserError:
        return 0


def with_given_ranks(config: RunConfig, variables: Mapping[str, str] = os.environ) -> RunConfig:
    """The configuration with the number of ranks that torchrun has started. Raises UserError as `rank_variables`."""
    size = rank_variables(config.learner, config.trainer.mode, variables).size
    return config.model_copy(update={"learner": config.learner.model_copy(update={"num_processes": size})})


def rank_variables(learner: LearnerConfig, mode: str, variables: Mapping[str, str] = os.environ) -> RankVariables:
    """Raises UserError where the variables contradict each other or the configuration, or the engine cannot be
    divided."""
    size = learner.num_processes
    given = _number(variables, "WORLD_SIZE", 1)
    if given == 1:  # no torchrun, or one that starts one process
        if _number(variables, "RANK", 0):
            raise UserError(
                f"RANK is {variables['RANK']}, and WORLD_SIZE is {variables.get('WORLD_SIZE', 'not set')}: this would "
                "be a second learner. Start the ranks by torchrun, or unset RANK"
            )
        return RankVariables(0, size, 0)
    if size not in (1, given):
        raise UserError(
            f"torchrun started {given} processes (WORLD_SIZE), and learner.num_processes is {size}. Leave the latter "
            f"out or set it to {given}, or start {size}"
        )
    if not learner.is_divided:
        raise UserError(
            f"torchrun started {given} processes, but learner.engine is torch, which trains in one. Set "
            "learner.engine=fsdp2"
        )
    if "RANK" not in variables:
        raise UserError(f"WORLD_SIZE is {given}, and RANK is not set. Start the ranks by torchrun, which sets both")
    rank = _number(variables, "RANK", 0)
    if not 0 <= rank < given:
        raise UserError(f"RANK is {rank}, and WORLD_SIZE is {given}: ranks are numbered from 0 to {given - 1}")
    missing = " and ".join(name for name in ADDRESS if not variables.get(name))
    if missing and STORE_PORT not in variables:
        raise UserError(
            f"RANK is {rank} and WORLD_SIZE {given}, without {missing}: the ranks cannot find each other. Start them "
            "by torchrun, or set rank 0's address and a free port of its machine in all of them"
        )
    here = _number(variables, "LOCAL_WORLD_SIZE", given)
    if mode == "sync" and here != given:
        raise UserError(
            f"trainer.mode is sync, and torchrun started {here} of {given} ranks on this machine: learner and rollout "
            "server take turns on the devices of one. Start all ranks here, or set trainer.mode=async"
        )
    return RankVariables(rank, given, _number(variables, "LOCAL_RANK", rank), is_given=True)


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(variables.get(name) or default)
    except ValueError:
        raise UserError(
            f"{name} is {variables[name]!r}, not a number. Start the ranks by torchrun, or unset {name}"
        ) from None
