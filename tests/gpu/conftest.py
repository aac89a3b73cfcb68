"""Tests marked `gpu` are skipped where there is no CUDA device; their halves on the CPU run everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asyncrl.devices.device import free_caches, resolve_device
from benchmarks.random_models import make_model

DEVICE = resolve_device("auto")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    reason = pytest.mark.skip(reason=f"torch {torch.__version__} sees no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(reason)


@pytest.fixture
def emptied_device() -> Iterator[None]:
    """Nothing of an earlier test is on the device, and nothing of this one stays."""
    free_caches(DEVICE)
    yield
    free_caches(DEVICE)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory):
    """Makes a model of a size and dtype once."""
    made: dict[tuple[str, str], Path] = {}

    def make(size: str, dtype: str, device: str) -> Path:
        if (size, dtype) not in made:
            folder = tmp_path_factory.mktemp("random") / size
            made[size, dtype] = make_model(folder, size, dtype=dtype, device=device)
            free_caches(DEVICE)
        return made[size, dtype]

    return make
