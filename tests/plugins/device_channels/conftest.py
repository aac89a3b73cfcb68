"""Fixtures of the channels between devices, and tests that need a CUDA device, as in tests/gpu."""

from __future__ import annotations

from tests.gpu.conftest import emptied_device, pytest_collection_modifyitems

__all__ = ["emptied_device", "pytest_collection_modifyitems"]
