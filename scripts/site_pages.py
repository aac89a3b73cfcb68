"""Hook of mkdocs: files of the repository that the pages link to become pages of the site.

A Markdown file is shown as a page, another file as its text, a folder as a list. Links are rewritten to these pages.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
DOCS = "docs"
SHOWN = "source"
"""Folder of the site for what is not in docs/."""
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}
_FENCED = re.compile(r"(^```.*?^```\s*?$|`[^`\n]+`)", re.M | re.S)
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each file outside docs/ that a page links to, and for those that these link to."""
    waiting = [(f"{DOCS}/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    known: set[str] = set()
    while waiting:
        place, text = waiting.pop()
        for target in _targets(place, text):
            if target not in known and _is_shown(target):
                known.add(target)
                page = _page_of(target)
                files.append(File.generated(config, _uri(target), content=page))
                waiting.append((target, page))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to the site's pages."""
    own = page.file.src_uri
    place = _place_of(own)

    def address(link: str) -> str:
        target = _resolved(place, link)
        if target is None:
            return link
        return posixpath.relpath(_uri(target), posixpath.dirname(own) or ".")

    return _outside_code(markdown, lambda text: _LINK.sub(lambda m: f"{m[1]}{address(m[2])}{m[3]}", text))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    return "".join(part if number % 2 else change(part) for number, part in enumerate(_FENCED.split(text)))


def _targets(place: str, text: str) -> list[str]:
    """Paths in the repository that a text at `place` links to."""
    found: list[str] = []
    _outside_code(text, lambda part: str(found.extend(link for _, link, _ in _LINK.findall(part))))
    return [target for link in found if (target := _resolved(place, link)) is not None]


def _resolved(place: str, link: str) -> str | None:
    """Path in the repository of a relative link; None for another address, and where there is nothing."""
    if re.match(r"[a-z]+:", link):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(place), link))
    return target if not target.startswith("..") and (ROOT / target).exists() else None


def _is_shown(target: str) -> bool:
    """Whether the target needs a page of its own: not what mkdocs finds in docs/."""
    return not target.startswith(f"{DOCS}/") or (ROOT / target).is_dir()


def _uri(target: str) -> str:
    """Address of a path of the repository among the site's sources."""
    if not _is_shown(target):
        return target.removeprefix(f"{DOCS}/")
    shown = f"{SHOWN}/{target.lstrip('.')}"  # mkdocs leaves hidden files out
    return shown if target.endswith(".md") else f"{shown}.md"


def _place_of(uri: str) -> str:
    """Path in the repository of what the site's source has at this address."""
    if not uri.startswith(f"{SHOWN}/"):
        return f"{DOCS}/{uri}"
    target = uri.removeprefix(f"{SHOWN}/")
    if (ROOT / target).is_file():
        return target
    return target.removesuffix(".md")


def _page_of(target: str) -> str:
    path = ROOT / target
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith((".", "__")))
        listed = [f"[{name}]({path.name}/{name})" if target.startswith(DOCS) else f"`{name}`" for name in names]
        return "\n".join([f"# {target}", "", *(f"- {entry}" for entry in listed)])
    text = path.read_text(encoding="utf-8")
    if target.endswith(".md"):
        return text
    return f"# {target}\n\n```` {LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"
