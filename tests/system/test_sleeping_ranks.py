"""Sync mode over ranks: they fall asleep and wake up together, nothing stays on their devices, and no bit changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config.schema import RunConfig
from learner.network.device_lease import HOLDER
from protocol.device_lock import USERS_FILE, read_tenure
from tests.conftest import small_config
from tests.rigs.rank_cases import ADAPTER, CASES, CRITIC, FULL, check_same_checkpoint, rows_of_sizes
from tests.rigs.rank_rig import run_ranks
from tests.rigs.small_runs import logs
from tests.rigs.two_processes import run_both
from tests.system.test_ranks import STEPS, check_run_with_a_killed_rank
from tests.system.test_resume import assert_same_run, resume_config

pytestmark = pytest.mark.slow
SLEEPING = (FULL, CRITIC, ADAPTER)
RANKS: dict[str, Any] = {"engine": "fsdp2", "num_processes": 2}


@pytest.fixture(scope="module")
def slept(tiny_model: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slept")
    data = rows_of_sizes(folder)
    configs: dict[str, RunConfig] = {}
    for case in SLEEPING:
        learner = {**CASES[case].get("learner", {}), "engine": "fsdp2", "optim": {"lr": 1e-3}}
        sections = {**CASES[case], "data": data, "learner": learner}
        for kind in ("awake", "slept"):
            configs[f"{case}, {kind}"] = small_config(tiny_model, digits_data, folder / "run", **sections)
    run_ranks(folder / "made", configs, steps=STEPS, sleeping=[f"{case}, slept" for case in SLEEPING])
    return folder / "made"


@pytest.mark.parametrize("case", SLEEPING)
def test_steps_of_ranks_that_sleep_between_them_have_the_same_bits(slept: Path, case: str) -> None:
    for step in range(STEPS + 1):
        mine, theirs = (load_file(slept / f"{case}, {kind}" / f"{step}.safetensors") for kind in ("awake", "slept"))
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    check_same_checkpoint(slept / f"{case}, awake", slept / f"{case}, slept")


def test_a_sync_run_of_ranks_is_their_on_policy_run_on_other_devices(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    asynchronous = resume_config(make_config, tmp_path / "async")
    learner = asynchronous.learner.model_copy(update=RANKS)
    asynchronous = asynchronous.model_copy(update={"learner": learner})
    trainer = asynchronous.trainer.model_copy(update={"mode": "sync"})
    sharing_device = asynchronous.model_copy(update={"run_dir": str(tmp_path / "sync"), "trainer": trainer})
    for config in (asynchronous, sharing_device):
        run = Path(config.run_dir)
        assert run_both(config, run) == (0, 0), logs(run)
    assert_same_run(tmp_path / "sync", tmp_path / "async", sharing_device)
    assert (tmp_path / "sync" / USERS_FILE).read_text().count("\n") == 1, "the server waits for rank 1's end, too"


def test_a_rank_that_dies_asleep_ends_all_and_they_begin_again(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The server has the device meanwhile, in its second turn."""

    def server_has_it(run: Path) -> bool:
        tenure = read_tenure(run)
        return tenure is not None and tenure.held and tenure.holder != HOLDER and tenure.fence > 3

    learner = {**RANKS, "max_staleness": 0, "optim": {"lr": 1e-3}}
    check_run_with_a_killed_rank(make_config, tmp_path, learner, steps=4, at=server_has_it, trainer={"mode": "sync"})
