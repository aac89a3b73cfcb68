"""Fixtures of the channels between devices."""

from __future__ import annotations

from tests.gpu.conftest import emptied_device

__all__ = ["emptied_device"]
