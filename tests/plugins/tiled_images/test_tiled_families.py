"""Families whose images are tiles are sampled, trained and frozen as the core's are, by the core's own tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from tests.plugins.tiled_images.tiny_tiled import NOT_SAMPLED, TILED, make_tiled
from tests.system.test_family_runs import check_run
from tests.unit.learner import test_families, test_vision_features
from tests.unit.learner.test_padded_step import check_step
from tests.unit.learner.test_vision_features import check_text_alone, runs_of

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., RunConfig]


@pytest.fixture(scope="module", params=[family for family in TILED if family not in NOT_SAMPLED])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "smolvlm":
        pytest.importorskip("num2words", reason="transformers' SmolVLMProcessor needs it")
    return make_tiled(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=["gemma3", "internvl", "lfm2_vl"])
def make_run(request: pytest.FixtureRequest, make_config: MakeConfig, tmp_path: Path) -> Callable[..., RunConfig]:
    return runs_of(make_tiled(request.param, tmp_path / "model"), make_config, tmp_path)


test_a_model_is_sampled_verified_and_trained = (
    test_families.test_a_family_is_sampled_verified_and_trained_as_its_own_model_computes
)
test_any_size_is_measured_as_the_processor_cuts_it = test_families.test_any_size_is_measured_as_the_processor_cuts_it
test_a_prompt_with_too_few_placeholders_is_refused = test_families.test_a_prompt_with_too_few_placeholders_is_refused
test_each_image_is_computed_once = test_vision_features.test_loss_and_gradients_stay_and_each_image_is_computed_once


@pytest.mark.parametrize("family", ["gemma3", "internvl"])
def test_a_micro_batch_of_text_alone_has_no_features(make_config: MakeConfig, tmp_path: Path, family: str) -> None:
    check_text_alone(make_config, tmp_path, make_tiled(family, tmp_path / "model"))


@pytest.mark.parametrize("family", ["internvl", "gemma3", "llava_next"])
def test_a_step_is_that_of_padded_rows_in_one_micro_batch_and_in_many(
    make_config: MakeConfig, tmp_path: Path, family: str
) -> None:
    check_step(make_config, tmp_path, family, make_tiled(family, tmp_path / "model"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["internvl", "llava_onevision", "gemma3", "idefics3", "llava_next"])
def test_a_family_is_trained_by_two_services(make_config: MakeConfig, tmp_path: Path, family: str) -> None:
    check_run(make_config, tmp_path, make_tiled(family, tmp_path / "model"))
