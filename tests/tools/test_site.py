"""The site of the documentation: it builds, and every link in it leads to a page and a place on it."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).parents[2]


class Links(HTMLParser):
    """Addresses and ids of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [value for name in ("href", "src") if (value := given.get(name))]
        self.ids |= {given.get("id") or ""}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_link_of_the_site_leads_to_a_place_on_a_page(site: Path) -> None:
    pages = {page: Links(page.read_text()) for page in site.rglob("*.html") if page.name != "404.html"}
    assert len(pages) > 100
    wrong = []
    for page, found in pages.items():
        for link in found.links:
            address, place = urldefrag(unquote(link))
            if ":" in address:
                continue
            target = (page.parent / address).resolve() if address else page
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (place and target in pages and place not in pages[target].ids):
                wrong.append(f"{page.relative_to(site)}: {link}")
    assert wrong == []


def test_the_reference_has_what_a_docstring_says(site: Path) -> None:
    page = (site / "api" / "index.html").read_text()
    for said in ("asyncrl_plugins.python_api.training.train", "never trained on", "The samples of the highest rewards"):
        assert said in page
    assert (site / "source" / "recipes" / "grpo_in_one_file.py" / "index.html").is_file()
