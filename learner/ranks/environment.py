"""The rank of this process: from torchrun's environment, from the rank 0 that started it, or from the configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError


@dataclass(frozen=True)
class RankEnvironment:
    rank: int
    size: int
    local_rank: int
    is_given: bool = False
    """True where torchrun has started all ranks, or rank 0 this one."""


def rank_of_service(variables: Mapping[str, str] = os.environ) -> int:
    """This process's rank; 0 where nothing says so."""
    return int(variables.get("RANK", "0")) if _size(variables) > 1 else 0


def rank_environment(config: RunConfig, variables: Mapping[str, str] = os.environ) -> RankEnvironment:
    """Raises UserError where torchrun and the configuration disagree, or the engine cannot be divided."""
    size = config.learner.num_processes
    given = _size(variables)
    if given == 1:  # no torchrun, or one that starts one process
        return RankEnvironment(0, size, 0)
    if size not in (1, given):
        raise UserError(
            f"torchrun started {given} processes (WORLD_SIZE), and learner.num_processes is {size}. Leave the latter "
            f"out, or start {size}"
        )
    if not config.learner.is_divided:
        raise UserError(
            f"torchrun started {given} processes, but learner.engine is torch, which trains in one. Set "
            "learner.engine=fsdp2"
        )
    rank = int(variables.get("RANK", "0"))
    return RankEnvironment(rank, given, int(variables.get("LOCAL_RANK", rank)), is_given=True)


def _size(variables: Mapping[str, str]) -> int:
    return int(variables.get("WORLD_SIZE", "1"))
