"""One optimiser step of each family through every engine, on one rank and two: loss and weights of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config.schema import RunConfig
from learner.ranks.group import ALONE
from tests.conftest import small_config
from tests.rigs.one_process import in_one_process
from tests.rigs.rank_rig import run_ranks, take_steps
from tests.rigs.tiny_families import make_recurrent
from tests.system.test_bad_input import write_rows
from tests.system.test_ranks import TOLERANCE
from tests.unit.learner.test_padded_step import FAMILIES, LR, rows_of

pytestmark = pytest.mark.slow
FSDP2: dict[str, Any] = {"engine": "fsdp2"}
RECURRENT = "qwen3_next"
"""A text family with recurrences, which each row passes from its beginning."""
TESTED = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", RECURRENT]
WHOLE, MANY = "one micro-batch", "many micro-batches, critic and reference"
FLIPPED = 2e-3
"""Share of the elements that may go the other way in AdamW's first step: gradients that are 0 but for rounding, such as
those of a key's bias."""


def config_of(family: str, case: str, folder: Path, data: Path) -> RunConfig:
    """Rows of no, one and three images of different sizes, and of videos where the family has them; rows of text."""
    folder.mkdir()
    if family == RECURRENT:
        rows = [{"prompt": "1 + 2"}, {"prompt": "a row that is longer than the others"}, {"prompt": "3"}]
        model, small = make_recurrent(folder / "model"), 160
    else:
        rows, small = rows_of(family, folder), 160 if family.startswith("qwen") else 88
        model = FAMILIES[family](folder / "model")
    return small_config(
        model,
        data,
        folder / "run",
        data={**write_rows(folder, rows), "max_prompt_length": small - 8},
        batch={
            "prompts_per_step": len(rows),
            "group_size": 4,
            "tokens_per_microbatch": 8192 if case == WHOLE else small,
        },
        algorithm={} if case == WHOLE else {"adv_estimator": "gae", "kl_loss_coef": 0.1},
        learner={"num_processes": 2, "optim": {"lr": LR, "weight_decay": 0.01}, **FSDP2},
    )


@pytest.fixture(scope="module")
def engines() -> dict[str, dict[str, Any]]:
    """Settings of the engines that are compared with one process. A plug-in's tests have others."""
    return {"fsdp2": FSDP2}


@pytest.fixture(scope="module")
def sizes() -> tuple[int, ...]:
    """Numbers of ranks. A plug-in's tests have others."""
    return 1, 2


@pytest.fixture(params=[1, 2])
def size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=["fsdp2"])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def found(
    engines: dict[str, dict[str, Any]],
    sizes: tuple[int, ...],
    digits_data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, Any]]:
    """Folder and metrics of every case."""
    folder = tmp_path_factory.mktemp("families")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    on_ranks: dict[str, RunConfig] = {}
    found: dict[str, Any] = {}
    for family in TESTED:
        for case in (WHOLE, MANY):
            name = f"{family}, {case}"
            config = config_of(family, case, folder / name, digits_data)
            found[name] = take_steps(in_one_process(config), folder / f"{name}, alone", ALONE, 1, saves=False)
            for engine, learner in engines.items():
                changed = config.learner.model_copy(update=learner)
                on_ranks[f"{name}, {engine}"] = config.model_copy(update={"learner": changed})
    torch.set_num_threads(threads)
    for size in sizes:
        results = run_ranks(folder / str(size), on_ranks, steps=1, size=size, saves=False)
        found |= {f"{size}/{name}": result for name, result in results.items()}
    return folder, found


@pytest.mark.parametrize("case", [WHOLE, MANY])
@pytest.mark.parametrize("family", TESTED)
def test_a_step_on_ranks_is_that_of_one_process(
    found: tuple[Path, dict[str, Any]], family: str, case: str, engine: str, size: int
) -> None:
    folder, results = found
    name = f"{family}, {case}"
    divided = f"{size}/{name}, {engine}"
    (mine,), (theirs,) = (results[each]["metrics"] for each in (name, divided))
    tolerance = TOLERANCE["float32"]
    assert theirs == pytest.approx(mine, rel=tolerance, abs=tolerance, nan_ok=True)
    files = folder / f"{name}, alone" / "1.safetensors", folder / divided / "1.safetensors"
    one, two = (load_file(file) for file in files)
    assert one.keys() == two.keys()
    flipped = sum(int((~torch.isclose(t, two[n], rtol=1e-2, atol=0.01 * LR)).sum()) for n, t in one.items())
    assert flipped <= FLIPPED * sum(tensor.numel() for tensor in one.values())
