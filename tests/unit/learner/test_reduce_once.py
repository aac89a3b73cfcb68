"""Room for whole gradients of an update on each rank."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from asyncrl.config.schema import RunConfig, changed
from asyncrl.memory_plan import GIB
from asyncrl.memory_plan.plan import make_plan
from learner.loop.trainer import check_room, reduce_once
from learner.ranks.group import Ranks

MakeConfig = Callable[..., RunConfig]
CPU = torch.device("cpu")


class OfTwo(Ranks):
    """Beside a rank that has room for 100 bytes."""

    def most(self, number: int) -> int:
        return max(number, -100)


def roles(*sizes: int) -> list[Any]:
    return [SimpleNamespace(trained=[torch.empty(size, device="meta")], reduces_once=None) for size in sizes]


@pytest.mark.parametrize(
    ("sizes", "room", "expected"), [((20, 5), 100, True), ((20, 6), GIB, False), ((25,), 99, False)]
)
def test_whole_gradients_of_all_roles_fit_on_the_rank_with_least_room(
    sizes: tuple[int, ...], room: int, expected: bool
) -> None:
    trained = roles(*sizes)
    reduce_once(trained, room, OfTwo(size=2))
    assert [role.reduces_once for role in trained] == [expected] * len(sizes)


def test_one_process_has_nothing_to_reduce() -> None:
    (alone,) = roles(1)
    reduce_once([alone], GIB, Ranks())
    assert alone.reduces_once is False


def test_room_is_what_the_learners_phase_leaves_of_the_budget(make_config: MakeConfig) -> None:
    config = make_config(learner={"engine": "fsdp2", "num_processes": 2, "device": "cpu"}, rollout={"device": "cuda"})
    planned = changed(config, {"gpu_memory.budget_gib": 2})
    assert check_room(planned, CPU, 2) == 2 * GIB - make_plan(planned).phases[0].nbytes > 0
    assert check_room(planned, CPU, 1) == 0, "without ranks nothing asks for it"
    assert check_room(config, CPU, 2) == psutil.virtual_memory().total // 8
