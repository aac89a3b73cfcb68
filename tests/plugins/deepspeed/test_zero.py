"""DeepSpeed's ZeRO takes the steps of one process, at each stage, on one rank and on two, and a run goes on with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.schema import RunConfig
from learner.loop.checkpoint import complete_checkpoints
from learner.ranks.group import ALONE
from learner.training.engine import ENGINE_FILE
from learner.training.sharded_files import named_values
from protocol.faults import SLOW_VARIABLE
from tests.conftest import small_config
from tests.rigs.rank_cases import ADAPTER, CASES, CRITIC, EXACT, FULL, OFFLOAD, check_same_checkpoint, rows_of_sizes
from tests.rigs.rank_rig import run_ranks, take_steps
from tests.rigs.zero import zero
from tests.system.test_ranks import (
    STEPS,
    TOLERANCE,
    check_run_with_a_killed_rank,
    check_stopped_before_an_update,
    check_weights,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]
PLACED = {
    1: [(FULL, 1), (FULL, 2), (FULL, 3)],
    2: [
        *((case, stage) for case in (FULL, CRITIC) for stage in (1, 2, 3)),
        (ADAPTER, 3),
        (EXACT, 2),
        (EXACT, 3),
        (OFFLOAD, 2),
    ],
}
"""Cases and stages by the number of ranks."""
RESUMED = [(FULL, 3), (CRITIC, 1), (ADAPTER, 3), (OFFLOAD, 3)]
"""Those that two ranks continue from the checkpoint of one process."""
POISONED = {
    f"poisoned, {dtype}, stage {stage}": (dtype, stage)
    for dtype, stage in (("float32", 2), ("bfloat16", 1), ("bfloat16", 2), ("bfloat16", 3))
}


@dataclass(frozen=True)
class Compared:
    folder: Path
    configs: dict[str, RunConfig]
    """Of one process, by cases."""
    metrics: dict[str, Any]
    """By names of folders in `folder`."""

    def check(self, case: str, alone: str, divided: str) -> None:
        """Compare metrics, published weights and checkpoints."""
        config = self.configs[case]
        tolerance = TOLERANCE[config.model.dtype]
        for mine, theirs in zip(self.metrics[alone], self.metrics[divided], strict=True):
            assert theirs == pytest.approx(mine, rel=tolerance, abs=tolerance, nan_ok=True)
        check_weights(config, self.folder / alone, self.folder / divided)


@pytest.fixture(scope="module")
def compared(tiny_model: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """All cases, alone and on ranks, which are started once for each number of them."""
    folder = tmp_path_factory.mktemp("zero")
    data = rows_of_sizes(folder)

    def make(sections: dict[str, Any], **learner: Any) -> RunConfig:
        optim = {"lr": 1e-3, "weight_decay": 0.01}
        settings = {"optim": optim, **sections.get("learner", {}), **learner}
        return small_config(tiny_model, digits_data, folder / "run", **{**sections, "data": data, "learner": settings})

    def divided(case: str, stage: int) -> RunConfig:
        return make(CASES[case], **zero(stage))

    found: dict[str, Any] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    configs = {case: make(sections, cpu_offload=False) for case, sections in CASES.items()}
    for case, config in configs.items():
        found[case] = take_steps(config, folder / case, ALONE, STEPS)
    for case, _ in RESUMED:
        found[f"{case}, again"] = take_steps(
            configs[case], folder / f"{case}, again", ALONE, STEPS, start=folder / case
        )
    torch.set_num_threads(threads)
    for size, placed in PLACED.items():
        on_ranks = {f"{case}, stage {stage}": divided(case, stage) for case, stage in placed}
        if size == 2:
            on_ranks |= {f"{case}, again": divided(case, stage) for case, stage in RESUMED}
            on_ranks |= {
                name: make({"model": {"dtype": dtype}}, **zero(stage)) for name, (dtype, stage) in POISONED.items()
            }
        starts = {f"{case}, again": folder / case for case, _ in RESUMED}
        results = run_ranks(
            folder / str(size), on_ranks, size=size, steps=STEPS, starts=starts, poisoned=list(POISONED)
        )
        found |= {f"{size}/{name}": result for name, result in results.items()}
    return Compared(folder, configs, {name: result.get("metrics") for name, result in found.items()})


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("size", "case", "stage"), [(n, *place) for n, places in PLACED.items() for place in places])
def test_steps_are_those_of_one_process(compared: Compared, size: int, case: str, stage: int) -> None:
    compared.check(case, case, f"{size}/{case}, stage {stage}")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", [case for case, _ in RESUMED])
def test_the_checkpoint_of_one_process_is_continued(compared: Compared, case: str) -> None:
    compared.check(case, f"{case}, again", f"2/{case}, again")


@pytest.mark.parametrize("name", POISONED)
def test_one_ranks_gradient_that_is_not_finite_stops_all(compared: Compared, name: str) -> None:
    check_stopped_before_an_update(compared.folder / "2" / name)


@pytest.mark.parametrize(
    ("case", "stage"), [(CRITIC, 1), (CRITIC, 2), (CRITIC, 3), (EXACT, 2), (EXACT, 3), (OFFLOAD, 2)]
)
def test_each_rank_writes_its_parts(compared: Compared, case: str, stage: int) -> None:
    """No rank has had the whole optimiser state, and small files were put together in memory one at a time."""
    folder = compared.folder / f"2/{case}, stage {stage}"
    of_rank = [list((folder / ENGINE_FILE).with_suffix("").glob(f"shard-0000{rank}-*")) for rank in (1, 2)]
    assert all(len(files) > 10 for files in of_rank)
    first, second = (sum(file.stat().st_size for file in files) for files in of_rank)
    assert first == pytest.approx(second, rel=0.1)
    record = torch.load(folder / ENGINE_FILE, weights_only=True)
    assert all(t.is_meta for _, t in named_values(record) if isinstance(t, torch.Tensor) and t.numel() > 1)


@pytest.mark.usefixtures("one_thread")
def test_any_engine_on_any_number_of_ranks_continues_with_the_same_bits(compared: Compared, tmp_path: Path) -> None:
    """A checkpoint that goes from hand to hand, read and written again without a step, stays what it was: model,
    masters, moments, critic and the averages of a moving reference."""
    alone = compared.configs[CRITIC]

    def of(engine: str, stage: int = 2) -> RunConfig:
        update = {"engine": engine} if engine == "fsdp2" else zero(stage)
        learner = alone.learner.model_copy(update=update)
        return alone.model_copy(update={"learner": learner})

    second, third = (compared.folder / f"2/{CRITIC}, stage {stage}" for stage in (2, 3))
    two, three, one, none = (tmp_path / size for size in ("two", "three", "one", "none"))
    handed = {
        (two, 2): {"a": (second, of("fsdp2")), "b": (second, of("deepspeed", 3)), "c": (third, of("deepspeed", 1))},
        (three, 3): {
            "a": (two / "a", of("deepspeed", 3)),
            "b": (two / "b", of("fsdp2")),
            "c": (two / "c", of("deepspeed", 2)),
        },
        (one, 1): {"a": (three / "a", of("deepspeed", 2)), "c": (three / "c", of("fsdp2"))},
    }
    for (folder, size), ways in handed.items():
        starts = {name: start for name, (start, _) in ways.items()}
        configs = {name: config for name, (_, config) in ways.items()}
        run_ranks(folder, configs, size=size, steps=STEPS, starts=starts, idle=True)
    none.mkdir()
    for name, start in {"a": one / "a", "b": three / "b", "c": one / "c"}.items():
        take_steps(alone, none / name, ALONE, STEPS, start, idle=True)
        check_same_checkpoint(third if name == "c" else second, none / name)


def test_a_rank_that_is_killed_while_it_writes_costs_nothing(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second checkpoint has its model, and parts are being written."""
    monkeypatch.setenv(SLOW_VARIABLE, "checkpoint.writing:2")

    def half_written(run: Path) -> bool:
        found = list((run / "checkpoints").glob(".step-000004.building-*/model/config.json"))
        return bool(found) and list(complete_checkpoints(run)) == [2]

    learner = {**zero(3), "num_processes": 2, "optim": {"lr": 1e-3}}
    check_run_with_a_killed_rank(make_config, tmp_path, learner, steps=6, at=half_written)
