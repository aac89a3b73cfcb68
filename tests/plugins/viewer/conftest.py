"""Fixtures of the tests of tools: a real browser, and the server of `asyncrl inspect` for made-up samples."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from asyncrl_plugins.viewer.inspect.server import InspectServer
from tests.plugins.viewer.made_up_samples import MadeUpStore


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the dev extra")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Debian's chromium")
    with playwright.sync_playwright() as running:
        launched = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InspectServer]:
    run_dir = tmp_path_factory.mktemp("run")
    with InspectServer(MadeUpStore(), run_dir, "127.0.0.1", 0) as serving:  # pyright: ignore[reportArgumentType]
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield serving
        serving.shutdown()
        thread.join(timeout=10)
