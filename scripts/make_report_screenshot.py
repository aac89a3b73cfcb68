"""Pictures of `asyncrl report` for the documentation, from a real run.

    python scripts/make_report_screenshot.py RUN [--folder docs/images]

Needs playwright and Debian's chromium.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from asyncrl.report.write import write_report

WIDTH = 1280
MARGIN, BELOW = 24, 10
PICTURES = {
    "report.png": ("header.top", "#learning .chart:nth-child(6)"),
    "report-timeline.png": ("#timeline", ".card"),
}
"""By file: from the top of the first to the bottom of the second."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("there is no chromium: apt-get install chromium")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        report = write_report([arguments.run_dir], Path(folder) / "report.html")
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = started.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.goto(report.as_uri())
        for name, (first, last) in PICTURES.items():
            target = arguments.folder / name
            take(page, first, last, target)
            print(f"{target}: {target.stat().st_size / 1000:.0f} kB")
        browser.close()


def take(page: Page, first: str, last: str, target: Path) -> None:
    top, bottom = page.locator(first).first.bounding_box(), page.locator(last).first.bounding_box()
    assert top is not None
    assert bottom is not None
    y = max(0, top["y"] - MARGIN)
    clip = {"x": 0, "y": y, "width": WIDTH, "height": bottom["y"] + bottom["height"] + BELOW - y}
    page.screenshot(path=target, full_page=True, clip=clip)  # type: ignore[arg-type]
    with Image.open(target) as picture:
        small = picture.convert("RGB")
    small.save(target, optimize=True)


if __name__ == "__main__":
    main()
