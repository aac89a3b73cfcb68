"""Ranks keep features of a frozen vision tower: the steps are the same, and the tower runs less often, on all alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import RunConfig
from learner.ranks.group import ALONE
from tests.conftest import small_config
from tests.rigs.one_process import in_one_process
from tests.rigs.rank_rig import run_ranks, take_steps
from tests.system.test_bad_input import image_rows, write_rows
from tests.system.test_families_on_ranks import FSDP2
from tests.system.test_ranks import STEPS, TOLERANCE, check_weights

pytestmark = pytest.mark.slow
SIZES = [(28, 40), (56, 28), (28, 28), (70, 42)]
"""Of the images in the rows, which have none, one, three and one."""
KEPT, COMPUTED = "kept", "computed in each pass"


def config_of(model: Path, data: Path, folder: Path, learner: dict[str, Any]) -> RunConfig:
    """Policy, reference and critic score each image, and two updates train with it."""
    shown = image_rows(folder, SIZES)
    rows = {**write_rows(folder, [*shown, shown[1]]), "max_prompt_length": 400, "shuffle": False}
    return small_config(
        model,
        data,
        folder / "run",
        model={"freeze_vision_tower": True, "freeze_connector": True},
        data=rows,
        batch={"prompts_per_step": 4, "group_size": 4, "tokens_per_microbatch": 410},
        algorithm={"adv_estimator": "gae", "kl_loss_coef": 0.1, "updates_per_batch": 2},
        learner={"num_processes": 2, "optim": {"lr": 1e-3, "weight_decay": 0.01}, **learner},
    )


@pytest.fixture(scope="module")
def engines() -> dict[str, dict[str, Any]]:
    """Settings of the engines that are compared with one process. A plug-in's tests have others."""
    return {"fsdp2": FSDP2}


@pytest.fixture(params=["fsdp2"])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def found(
    engines: dict[str, dict[str, Any]], tiny_model: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, RunConfig, dict[str, Any]]:
    """Two steps of one batch: alone, and on two ranks of each engine."""
    folder = tmp_path_factory.mktemp("vision")
    configs = {
        f"{engine}, {name}": config_of(tiny_model, digits_data, folder, {**learner, "vision_features_mib": mib})
        for engine, learner in engines.items()
        for name, mib in ((KEPT, 64), (COMPUTED, 0))
    }
    alone = in_one_process(config_of(tiny_model, digits_data, folder, {**FSDP2, "vision_features_mib": 0}))
    results = {"alone": take_steps(alone, folder / "alone", ALONE, STEPS)}
    return folder, alone, {**results, **run_ranks(folder / "two", configs, steps=STEPS)}


@pytest.mark.usefixtures("one_thread")
def test_steps_are_those_of_one_process_that_keeps_nothing(
    found: tuple[Path, RunConfig, dict[str, Any]], engine: str
) -> None:
    folder, config, results = found
    kept, computed = (results[f"{engine}, {name}"] for name in (KEPT, COMPUTED))
    tolerance = TOLERANCE["float32"]
    for mine, theirs, plain in zip(results["alone"]["metrics"], kept["metrics"], computed["metrics"], strict=True):
        said = {name: theirs.pop(name) for name in ("vision/images", "vision/reused")}
        assert said["vision/images"] > 0
        assert theirs == pytest.approx(mine, rel=tolerance, abs=tolerance, nan_ok=True)
        assert theirs == pytest.approx(plain, rel=tolerance, abs=tolerance, nan_ok=True)
    check_weights(config, folder / "alone", folder / "two" / f"{engine}, {KEPT}")
    check_weights(config, folder / "two" / f"{engine}, {COMPUTED}", folder / "two" / f"{engine}, {KEPT}")


def test_the_tower_runs_less_often_and_on_ranks_that_gather_it_alike(
    found: tuple[Path, RunConfig, dict[str, Any]], engine: str
) -> None:
    _, _, results = found
    passes = results[f"{engine}, {KEPT}"]["tower passes"]
    assert min(passes[0]) > 0
    assert passes[1] == passes[0], "the second step finds all"
    assert all(counts[1] > counts[0] for counts in zip(*results[f"{engine}, {COMPUTED}"]["tower passes"], strict=True))
    gathers = engine in ("fsdp2", "ZeRO-3")
    assert (len(set(passes[0])) == 1) == gathers, "ranks have different images, and run it alike where they have to"
