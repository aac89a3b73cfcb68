"""Generated pages are current, and links in the documentation lead somewhere."""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path

import pytest

from asyncrl.algorithms.ratios import PolicyTokens

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_anchors_are_headings_or_ids_of_their_page(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text()) if "://" not in link[0]]
    missing = []
    for target, anchor in links:
        named = (page.parent / target).resolve() if target else page
        if named.suffix == ".md" and named.exists() and anchor not in anchors(named):
            missing.append(f"{target}#{anchor}")
    assert missing == []


def test_the_example_of_a_plug_in_is_the_package_that_a_test_installs() -> None:
    package = ROOT / "tests" / "rigs" / "third_party"
    told = "\n".join(file.read_text() for file in (package / "pyproject.toml", *package.rglob("*.py")))
    page = (ROOT / "docs" / "plugins.md").read_text()
    blocks = re.findall(r"^```(?:python|toml)\n(.*?)^```$", page, flags=re.M | re.S)
    assert [line for block in blocks for line in block.splitlines() if line not in told] == []
    assert len(page.split()) <= 700


def anchors(page: Path) -> set[str]:
    """Anchors of headings as GitHub makes them, and ids."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    names = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in re.findall(r"^#+ (.*)$", text, re.M))
    return {name.strip().replace(" ", "-") for name in names} | set(re.findall(r'id="([^"]+)"', text))


def test_the_page_of_a_loss_of_ones_own_names_every_field_that_it_sees() -> None:
    page = (ROOT / "docs" / "bring-your-own.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("`f(tokens: PolicyTokens, config)"))
    assert {field.name for field in dataclasses.fields(PolicyTokens)} <= set(re.findall(r"`(\w+)`", line))


def test_every_picture_is_shown_somewhere() -> None:
    shown = "".join(page.read_text() for page in PAGES)
    for picture in (ROOT / "docs" / "images").iterdir():
        assert f"images/{picture.name})" in shown, picture.name
