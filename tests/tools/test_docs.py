"""Generated pages are current, and links in the documentation lead somewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "protocol" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "asyncrl_plugins").glob("*/*.md")),
]


def test_generated_pages_are_current() -> None:
    pages = runpy.run_path(str(ROOT / "scripts" / "make_docs.py"))["pages"]()
    for name, text in pages.items():
        assert (ROOT / name).read_text() == text, f"run: python scripts/make_docs.py ({name} is old)"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", page.read_text())
    local = [target for target in targets if "://" not in target]
    missing = [target for target in local if not (page.parent / target).exists()]
    assert missing == []


def test_every_picture_is_shown_somewhere() -> None:
    shown = "".join(page.read_text() for page in PAGES)
    for picture in (ROOT / "docs" / "images").iterdir():
        assert f"images/{picture.name})" in shown, picture.name
