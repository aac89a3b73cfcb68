"""Pictures of `asyncrl inspect` and `asyncrl report` for the documentation, from a real run.

    python scripts/make_screenshots.py RUN [--folder docs/images]

Needs playwright (of the dev extra) and Debian's chromium.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from asyncrl_plugins.viewer.inspect.server import InspectServer
from asyncrl_plugins.viewer.report.write import write_report
from asyncrl_plugins.viewer.samples.model import SampleQuery, SampleRow
from asyncrl_plugins.viewer.samples.store import SampleStore

WIDTH, HEIGHT = 1360, 860
PAGE_ROWS = 50
LOOKED_AT = 5000
"""Number of newest samples to choose from: the most telling one of them is shown."""
REPORT_WIDTH = 1280
MARGIN, BELOW = 24, 10
PICTURES = {
    "report.png": ("header.top", "#learning .chart:nth-child(6)"),
    "report-timeline.png": ("#timeline", ".card"),
}
"""Cut by file: from the top of the first to the bottom of the second."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("there is no chromium: apt-get install chromium")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as started:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = started.chromium.launch(executable_path=chromium, args=flags)
        for target in (
            *inspect(browser, arguments.run_dir, arguments.folder),
            *report(browser, arguments.run_dir, arguments.folder),
        ):
            print(f"{target}: {target.stat().st_size / 1000:.0f} kB")
        browser.close()


# --- inspect ---------------------------------------------------------------------------------------------


def inspect(browser: Browser, run_dir: Path, folder: Path) -> list[Path]:
    targets = {"light": folder / "inspect.png", "dark": folder / "inspect-dark.png"}
    with closing(SampleStore(run_dir)) as store, InspectServer(store, run_dir, "127.0.0.1", 0) as server:
        address = f"{server.url}?{place_of(store, most_telling(store))}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for theme, target in targets.items():
            take_sample(browser, address, theme, target)
        server.shutdown()
    return list(targets.values())


def most_telling(store: SampleStore) -> SampleRow:
    """Sample with the largest difference between learner and engine, near the top of its group."""
    rows = store.find(SampleQuery(), limit=LOOKED_AT).rows
    near_the_top = (row for row in rows if row.has_payload and row.trajectory in (1, 2))
    return max(near_the_top, key=lambda row: row.logprob_diff_max or 0.0)


def place_of(store: SampleStore, sample: SampleRow) -> str:
    """The address of the list's page that holds it, and of the sample itself."""
    assert sample.step is not None
    rows = store.find(SampleQuery(steps=(sample.step, sample.step)), limit=LOOKED_AT).rows
    return urlencode(
        {
            "step": sample.step,
            "page": rows.index(sample) // PAGE_ROWS + 1,
            "sample": f"{sample.ticket_id}.{sample.trajectory}",
        }
    )


def take_sample(browser: Browser, address: str, theme: str, target: Path) -> None:
    page = browser.new_page(
        viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="dark" if theme == "dark" else "light"
    )
    page.goto(address)
    page.wait_for_selector(".completion.chosen")
    page.wait_for_load_state("networkidle")
    page.eval_on_selector("#group", "group => { group.scrollTop = 0; }")
    strongest = page.query_selector(".completion.chosen .tokens :is([data-diff=d], [data-diff='4'], [data-diff=c])")
    if strongest is not None and strongest.is_visible():
        strongest.hover()
    page.screenshot(path=target)
    page.close()


# --- report ----------------------------------------------------------------------------------------------


def report(browser: Browser, run_dir: Path, folder: Path) -> list[Path]:
    with tempfile.TemporaryDirectory() as temporary:
        page = browser.new_page(viewport={"width": REPORT_WIDTH, "height": 900}, color_scheme="light")
        page.goto(write_report([run_dir], Path(temporary) / "report.html").as_uri())
        for name, (first, last) in PICTURES.items():
            take_part(page, first, last, folder / name)
    return [folder / name for name in PICTURES]


def take_part(page: Page, first: str, last: str, target: Path) -> None:
    top, bottom = page.locator(first).first.bounding_box(), page.locator(last).first.bounding_box()
    assert top is not None
    assert bottom is not None
    y = max(0, top["y"] - MARGIN)
    clip = {"x": 0, "y": y, "width": REPORT_WIDTH, "height": bottom["y"] + bottom["height"] + BELOW - y}
    page.screenshot(path=target, full_page=True, clip=clip)  # type: ignore[arg-type]
    with Image.open(target) as picture:
        small = picture.convert("RGB")
    small.save(target, optimize=True)


if __name__ == "__main__":
    main()
