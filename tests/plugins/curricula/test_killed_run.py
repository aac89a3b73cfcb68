"""A run whose filters drop most groups and whose prompt source passes rows over: killed, it is the unbroken run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import RunConfig
from tests.rigs.filtered_run import check_filtered_run

pytestmark = pytest.mark.slow


def test_a_killed_run_with_filters_and_greso_ends_its_epochs_with_the_same_bits(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    check_filtered_run(make_config, tmp_path, greso={})
