"""Refuse docstrings, configuration key helps and Markdown headings whose first sentence withholds its noun.

    python scripts/lint_english.py [--list] [PATH ...]

A docstring of a module, class, function or attribute (key helps are docstrings of attributes) begins with the noun that
it describes, or with a verb in a function's docstring. Openings such as "What ...", "Of ..." or "The same ..." are
refused, as are sentences listed in WORST. Prints each finding as FILE:LINE: FIRST WORDS and exits with code 1.
`--list` exits with code 0. Without PATH the code and the pages of the repository are read, of tests the docstrings of
modules; the lab log and the decision records are left out.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CODE = (
    *("asyncrl", "rollout_server", "learner", "protocol", "asyncrl_plugins"),
    *("scripts", "benchmarks", "examples", "recipes"),
)
TESTS = "tests"
"""Docstrings of modules alone: those of tests go on with the sentence that is their name."""
PAGES = ("README.md", "CHANGELOG.md", "docs", "docker", *CODE)
UNREAD = ("docs/lab-log", "docs/decisions")
OPENINGS = (
    *("What", "Of", "That", "It", "By", "Who", "Whoever", "Whose", "Whom", "Also", "Until", "Only", "Nobody"),
    *("Somebody", "Everybody", "Which", "Whichever", "Whatever", "Where", "Wherever", "Why", "When", "These", "Those"),
    *("Then", "Thereby", "And", "But", "Or", "Because", "Since", "As", "So", "Its", "Their", "Them", "They", "There"),
    "Such",
)
"""First words that are no noun and no verb: relative clauses and pronouns, each half a sentence."""
PREPOSITIONS = ("For", "In", "With", "Without", "Between", "Beside", "Before", "After", "On", "At")
"""First words that are refused in docstrings and good enough for a heading (In the terminal)."""
PHRASES = ("The same", "The one", "The ones", "Do it", "Do them", r"Whether \S+[.;:]", r"Whether \S+ \S+[.;:]")
"""Beginnings of several words, as regular expressions: a Whether needs a subject and a verb."""
WORST = (
    "of sums of parts of groups",
    "also where it has ended before",
    "nothing of it may count",
    "was to blame",
    "is in no column",
    "what the engine has suspended",
    "what the policy makes of masked images alone",
    "of which no token is trained",
    "by the version whose differences they are",
    "may come back with it",
)
"""Sentences that nobody understood, in lower case: none of them comes back."""
_OPENING = re.compile(rf"(?:{'|'.join(PHRASES)}|(?:{'|'.join(OPENINGS)})\b(?!-))")
_PREPOSITION = re.compile(rf"(?:{'|'.join(PREPOSITIONS)})\b(?!-)")
_FENCE = re.compile(r"^(```|~~~)")


class Finding(NamedTuple):
    """An opening that is refused."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        place = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{place}:{self.line}: {self.text[:100]}"


def is_refused(text: str) -> bool:
    """True for a text whose first word is no noun and no verb, or that has one of the WORST sentences."""
    return bool(_OPENING.match(text)) or any(sentence in text.lower() for sentence in WORST)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring: strings that begin a body, or follow an assignment."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for before, statement in zip([None, *body], body, strict=False):
            after_assignment = isinstance(before, ast.Assign | ast.AnnAssign)
            if (before is None and documented) or after_assignment:
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield statement.lineno, value.value


def headings(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of each Markdown heading outside code blocks."""
    in_code = False
    for number, line in enumerate(text.splitlines(), start=1):
        in_code ^= bool(_FENCE.match(line))
        if not in_code and (match := re.match(r"#+ +(.*)", line)):
            yield number, match[1].strip("`*")


def findings(paths: Sequence[Path]) -> Iterator[Finding]:
    """Refused texts of Python and Markdown files, folders searched."""
    for file in (file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])):
        if any(file.is_relative_to(ROOT / unread) for unread in UNREAD):
            continue
        if file.suffix == ".py":
            found = list(docstrings(ast.parse(file.read_text(encoding="utf-8"))))
            is_test = file.is_relative_to(ROOT / TESTS) and not file.is_relative_to(ROOT / TESTS / "rigs")
            texts = [(line, " ".join(text.split())) for line, text in (found[:1] if is_test else found)]
            yield from (Finding(file, *one) for one in texts if is_refused(one[1]) or _PREPOSITION.match(one[1]))
        elif file.suffix == ".md":
            yield from (Finding(file, *one) for one in headings(file.read_text(encoding="utf-8")) if is_refused(one[1]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 1 if something is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--list", action="store_true", help="print the findings and exit with code 0")
    options = parser.parse_args(arguments)
    paths = options.paths or [ROOT / name for name in dict.fromkeys((*CODE, TESTS, *PAGES)) if (ROOT / name).exists()]
    found = sorted(set(findings([path.resolve() for path in paths])))
    for finding in found:
        print(finding)
    if found:
        print(f"{len(found)} openings without a noun: begin with the noun or verb that is described", file=sys.stderr)
    return 1 if found and not options.list else 0


if __name__ == "__main__":
    sys.exit(main())
