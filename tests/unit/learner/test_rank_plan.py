"""The plan of an update over ranks, the commands between them, and what cannot be divided."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch._C._distributed_c10d import HashStore

from asyncrl.config.schema import RunConfig
from asyncrl.devices.gpu_assignment import assign_gpus, check_assignment
from asyncrl.errors import UserError, WaitTimeoutError
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from learner.ranks.commands import pack_groups, unpack_groups
from learner.ranks.processes import check_local_ranks, given_store, join
from learner.ranks.rank_variables import RankVariables, rank_variables, with_given_ranks
from learner.training.batch import make_batch
from learner.training.packing import PackedTrajectory, Segment, TrainGroup, plan_micro_batches
from learner.training.rank_plan import plan_shares
from tests.rigs.made_up_batch import made_up_batch

MakeConfig = Callable[..., RunConfig]


def group(prompt: int, lengths: list[int], first_row: int, *, images: int = 0) -> TrainGroup:
    ids = np.zeros(prompt, np.int32)
    encoded = EncodedPrompt("row", ids, ids, np.ones((images, 3), np.int32), ())
    rows = [PackedTrajectory(first_row + i, np.zeros(n, np.int32), np.ones(n, np.uint8)) for i, n in enumerate(lengths)]
    return TrainGroup(encoded, tuple(rows))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("budget", [60, 100, 4000])
def test_each_completion_is_trained_once_and_ranks_have_as_much_to_do(size: int, budget: int) -> None:
    rng = np.random.default_rng(0)
    groups = [group(20, rng.integers(2, 40, 4).tolist(), 4 * i, images=i % 2) for i in range(7)]
    plan = plan_shares(groups, budget, size)
    assert all(len(shares) == size for shares in plan)
    trained = [
        completion.row
        for shares in plan
        for share in shares
        if not share.is_idle
        for part in share.groups
        for completion in part.completions
        if completion.is_trained.any()
    ]
    assert sorted(trained) == list(range(28))
    for shares in plan:
        assert len({any(len(part.prompt.image_grids) for part in share.groups) for share in shares}) == 1
        tokens = [sum(part.num_tokens for part in share.groups) for share in shares]
        companion = 20  # a prompt with an image beside a share without any
        assert max(tokens) <= max(budget, 60) + companion
    if budget == 4000:
        tokens = [
            sum(part.num_tokens for part in share.groups if part.completions[0].is_trained.any()) for share in plan[0]
        ]
        assert len(plan) == 1
        assert max(tokens) < 1.3 * min(tokens)


def test_a_rank_without_work_repeats_a_part_that_does_not_count() -> None:
    plan = plan_shares([group(5, [3], 0)], 100, 2)
    assert [share.is_idle for share in plan[0]] == [False, True]
    assert plan[0][0].groups == plan[0][1].groups


def test_a_rank_without_images_is_shown_what_an_environment_shows_another() -> None:
    seen = group(5, [4], 0, images=1).prompt
    asked, answered = group(5, [30], 0), group(5, [30], 1)
    observed = replace(answered.completions[0], segments=(Segment(observed=seen),))
    (shares,) = plan_shares([asked, replace(answered, completions=(observed,))], 100, 2)
    masks = [[int(c.is_trained.sum()) for part in share.groups for c in part.completions] for share in shares]
    assert sorted(masks) == [[30], [30, 0]]
    assert all(
        any(o is seen for part in share.groups for c in part.completions for o in c.observed) for share in shares
    )


def test_one_rank_has_the_micro_batches_that_it_always_had() -> None:
    groups = [group(20, [10, 20, 30], 3 * i) for i in range(5)]
    assert [list(shares[0].groups) for shares in plan_shares(groups, 90, 1)] == plan_micro_batches(groups, 90)


def test_ranks_get_the_groups_as_they_came(make_config: MakeConfig) -> None:
    config = make_config()
    processor = PromptProcessor(config.model)
    batch = made_up_batch(config, processor)
    again = make_batch(unpack_groups(pack_groups(batch.received), processor), processor)
    for name in ("scores", "behaviour_logprobs", "versions", "row_start"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(again, name))
    assert [g.prompt.image_hashes for g in batch.train_groups] == [g.prompt.image_hashes for g in again.train_groups]


FSDP2 = {"engine": "fsdp2", "num_processes": 2}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"learner": {"num_processes": 2}}, r"num_processes is 2, but learner.engine is torch"),
        ({"learner": {"engine": "fsdp3"}}, r"learner.engine is 'fsdp3', and there are torch, fsdp2.* 'fsdp2'\?"),
        (
            {"learner": FSDP2, "trainer": {"mode": "sync"}, "rollout": {"tensor_parallel_size": 3}},
            r"the ranks have 2 devices. Set rollout.tensor_parallel_size=2",
        ),
        (
            {"learner": FSDP2, "reference": {"offload": True}, "algorithm": {"kl_loss_coef": 0.1}},
            r"fsdp2, but reference.offload is true",
        ),
        ({"learner": {**FSDP2, "device": "cuda:1"}}, r"learner.device is cuda:1, one GPU"),
    ],
)
@pytest.mark.usefixtures("wide_hf")
def test_what_cannot_be_divided_is_refused(make_config: MakeConfig, sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_config(**sections)


def test_each_rank_has_a_gpu_of_its_own(make_config: MakeConfig) -> None:
    config = make_config(learner={**FSDP2, "device": "cuda"}, rollout={"device": "cuda"})
    assert assign_gpus(config, 4).learner == (0, 1)
    assert assign_gpus(config, 4).servers == ((2,),)
    with pytest.raises(UserError, match="num_processes is 2, and there are 1 GPU"):
        check_assignment(config, ["0"])


UNDER_TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_ranks_that_take_turns_are_on_one_machine(make_config: MakeConfig) -> None:
    config = make_config(learner={"engine": "fsdp2"}, trainer={"mode": "sync"})
    assert rank_variables(config.learner, config.trainer.mode, {**UNDER_TORCHRUN, "LOCAL_WORLD_SIZE": "4"}).size == 4
    with pytest.raises(UserError, match=r"torchrun started 2 of 4 ranks on this machine.*trainer.mode=async"):
        rank_variables(config.learner, config.trainer.mode, {**UNDER_TORCHRUN, "LOCAL_WORLD_SIZE": "2"})


def test_torchrun_says_how_many_ranks_there_are(make_config: MakeConfig) -> None:
    config = make_config(learner={"engine": "fsdp2"})
    assert rank_variables(config.learner, config.trainer.mode, UNDER_TORCHRUN) == RankVariables(3, 4, 1, is_given=True)
    assert with_given_ranks(config, UNDER_TORCHRUN).learner.num_processes == 4
    assert rank_variables(make_config(learner=FSDP2).learner, "async", {"WORLD_SIZE": "1"}) == RankVariables(0, 2, 0)
    assert rank_variables(make_config(learner=FSDP2).learner, "async", {}) == RankVariables(0, 2, 0)


@pytest.mark.parametrize(
    ("learner", "variables", "says"),
    [
        (
            FSDP2,
            {},
            r"4 processes \(WORLD_SIZE\), and learner.num_processes is 2\. Leave .* or set it to 4, or start 2",
        ),
        ({}, {}, r"4 processes, but learner\.engine is torch.*Set learner\.engine=fsdp2"),
        (
            {"engine": "fsdp2"},
            {"MASTER_ADDR": ""},
            r"RANK is 3 and WORLD_SIZE 4, without MASTER_ADDR: .*by torchrun",
        ),
        ({"engine": "fsdp2"}, {"MASTER_ADDR": "", "MASTER_PORT": ""}, r"without MASTER_ADDR and MASTER_PORT: "),
        ({"engine": "fsdp2"}, {"RANK": "4"}, r"RANK is 4, and WORLD_SIZE is 4: ranks are numbered from 0 to 3"),
        ({"engine": "fsdp2"}, {"RANK": None}, r"WORLD_SIZE is 4, and RANK is not set"),
        ({"engine": "fsdp2"}, {"WORLD_SIZE": None}, r"RANK is 3, and WORLD_SIZE is not set: this would be a second"),
        ({"engine": "fsdp2"}, {"WORLD_SIZE": "four"}, r"WORLD_SIZE is 'four', not a number"),
    ],
)
def test_ranks_that_cannot_be_are_refused_before_anything_is_loaded(
    make_config: MakeConfig, learner: dict[str, Any], variables: dict[str, str | None], says: str
) -> None:
    changed = {name: value for name, value in {**UNDER_TORCHRUN, **variables}.items() if value is not None}
    with pytest.raises(UserError, match=says):
        rank_variables(make_config(learner=learner).learner, "async", changed)


def test_fewer_gpus_than_ranks_are_refused_with_the_number_that_fits(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    config = make_config(learner={"engine": "fsdp2", "num_processes": 4, "device": "cuda"})
    with pytest.raises(UserError, match=r"4 ranks .* on this machine, which shows 3 GPU.*num_processes=3"):
        check_local_ranks(config.learner.device, 4)
    check_local_ranks(config.learner.device, 3)


def test_a_rank_that_does_not_come_is_named(make_config: MakeConfig) -> None:
    config = make_config(learner={**FSDP2, "wait_timeout_s": 0.5})
    store: Any = HashStore()
    with pytest.raises(WaitTimeoutError, match=r"rank 1 of 2 has not come within 0\.5 s \(learner\.wait_timeout_s\)"):
        join(config.learner, store, RankVariables(0, 2, 0), commands=None)  # type: ignore[arg-type]


def test_the_reason_of_a_rank_that_ended_is_said_while_it_is_waited_for(make_config: MakeConfig) -> None:
    def ended() -> None:
        raise UserError("rank 1: no such folder")

    store: Any = HashStore()
    with pytest.raises(UserError, match="rank 1: no such folder"):
        join(make_config(learner=FSDP2).learner, store, RankVariables(0, 2, 0), None, ended)  # type: ignore[arg-type]


def test_a_store_that_does_not_answer_is_named(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    config = make_config(learner={"engine": "fsdp2", "wait_timeout_s": 1.0})
    with pytest.raises(WaitTimeoutError, match=rf"rank 0's store at 127\.0\.0\.1:{port} .* within 1 s"):
        given_store(config.learner.wait_timeout_s)
