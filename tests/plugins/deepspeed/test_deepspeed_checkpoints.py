"""Checkpoints in DeepSpeed's own format: a run goes on from them as from portable ones, and DeepSpeed's tools read
them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError, UserError
from asyncrl_plugins.deepspeed.engine import OWN_TAG
from asyncrl_plugins.deepspeed.plugin import placement
from learner.checkpoint.storage import complete_checkpoints, read_state
from learner.ranks.group import ALONE
from learner.training.engine import ENGINE_FILE
from learner.training.sharded_files import OWN_FORMAT, OWN_SUFFIX, check_portable, is_portable
from tests.conftest import small_config
from tests.rigs.made_again import is_made_again
from tests.rigs.rank_cases import ADAPTER, CASES, CRITIC, FULL, OFFLOAD, check_same_checkpoint, rows_of_sizes
from tests.rigs.rank_rig import run_ranks, take_steps
from tests.rigs.zero import zero
from tests.system.test_ranks import STEPS, check_run_with_a_killed_rank

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]
WRITTEN = [(FULL, 3), (CRITIC, 1), (ADAPTER, 3), (OFFLOAD, 2)]
FORMATS = ("portable", "deepspeed")


@pytest.fixture(scope="module")
def made(tiny_model: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Steps of two ranks, saved in both formats; and as many behind them, saved as portable. Returns the folder and
    metrics."""
    folder = tmp_path_factory.mktemp("own")
    data = rows_of_sizes(folder)

    def make(case: str, stage: int, kind: str) -> RunConfig:
        engine = {**zero(stage, checkpoint_format=kind), "optim": {"lr": 1e-3}}
        learner = {**CASES[case].get("learner", {}), **engine}
        sections = {**CASES[case], "data": data, "learner": learner, "trainer": {"save_async": False}}
        return small_config(tiny_model, digits_data, folder / "run", **sections)

    names = {f"{case}, {kind}": (case, stage, kind) for case, stage in WRITTEN for kind in FORMATS}
    first = {name: make(case, stage, kind) for name, (case, stage, kind) in names.items()}
    again = {name: make(case, stage, "portable") for name, (case, stage, _) in names.items()}
    found = {"first": run_ranks(folder / "first", first, steps=STEPS)}
    starts = {name: folder / "first" / name for name in names}
    found["again"] = run_ranks(folder / "again", again, steps=STEPS, starts=starts)
    return folder, {"configs": first, **found}


@pytest.mark.parametrize("case", [case for case, _ in WRITTEN])
def test_a_run_goes_on_from_it_with_the_same_bits(made: tuple[Path, Any], case: str) -> None:
    folder, found = made
    portable, own = (f"{case}, {kind}" for kind in FORMATS)
    record = torch.load(folder / "first" / own / ENGINE_FILE, weights_only=True)
    assert record[OWN_FORMAT]["placement"]["learner.num_processes"] == 2
    assert not (folder / "first" / own / ENGINE_FILE).with_suffix("").exists(), "it is not written twice"
    steps = zip(*(found["again"][name]["metrics"] for name in (own, portable)), strict=True)
    assert all(mine == pytest.approx(theirs, rel=0, abs=0, nan_ok=True) for mine, theirs in steps)
    for step in range(STEPS + 1):
        mine, theirs = (load_file(folder / "again" / name / f"{step}.safetensors") for name in (own, portable))
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    check_same_checkpoint(folder / "again" / portable, folder / "again" / own)


def test_deepspeeds_own_tool_puts_the_weights_together(made: tuple[Path, Any]) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    folder = made[0] / "first" / f"{FULL}, deepspeed"
    whole = get_fp32_state_dict_from_zero_checkpoint(str((folder / ENGINE_FILE).with_suffix(OWN_SUFFIX)), OWN_TAG)
    published = load_file(folder / f"{STEPS}.safetensors")
    assert published
    assert all(torch.equal(whole[f"model.{name}"], tensor) for name, tensor in published.items())


def test_another_placement_is_refused_with_the_way_to_it(made: tuple[Path, Any], tmp_path: Path) -> None:
    folder, found = made
    name = f"{OFFLOAD}, deepspeed"
    start, config = folder / "first" / name, found["configs"][name]
    learner = {"engine": "torch", "cpu_offload": False}
    alone = config.model_copy(update={"learner": config.learner.model_copy(update=learner)})
    told = (
        r"DeepSpeed's own format.*learner.deepspeed.zero_stage=2 learner.num_processes=2\. Resume once, .*"
        r"learner.deepspeed.checkpoint_format=portable"
    )
    with pytest.raises(UserError, match=told):
        take_steps(alone, tmp_path / "alone", ALONE, STEPS, start, idle=True)
    record = torch.load(start / ENGINE_FILE, weights_only=True)
    check_portable(record, start, placement(2, 2))
    for stage, ranks in ((2, 1), (3, 2)):
        with pytest.raises(UserError, match=told):
            check_portable(record, start, placement(stage, ranks))


def test_a_run_with_a_killed_rank_goes_on_from_it_and_makes_it_portable(
    make_config: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A replay of its steps begins where one process can, and knows that ranks have made them."""
    learner = {**zero(2, checkpoint_format="deepspeed"), "num_processes": 2, "optim": {"lr": 1e-3}}
    run = check_run_with_a_killed_rank(
        make_config, tmp_path, learner, steps=4, at=lambda run: 2 in complete_checkpoints(run)
    )
    assert [is_portable(folder) for folder in complete_checkpoints(run).values()] == [True, True]
    (run / "checkpoints" / "step-000006" / "notes.txt").write_text("mine")
    with pytest.raises(BadStateError, match=r"not written with it: notes\.txt\. Move it out"):
        read_state(run / "checkpoints" / "step-000006")
    assert is_made_again(run, 4)
    if printed := capsys.readouterr().out:  # of the replay, where that plug-in is installed
        assert "from the initial model" in printed
        assert "over ranks, sums have another order" in printed
