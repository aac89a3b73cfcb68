"""scripts/lint_english.py refuses texts that open without a noun, and nothing else."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

LINT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "lint_english.py"))
MODULE = '''"""Module."""
LIMIT = 1
"""Of a file."""
class Row:
    """What a table has."""
    name: str = ""
    """That of the row."""
    def close(self):
        """Close the row."""
        "no docstring"
'''


@pytest.mark.parametrize(
    "text",
    [
        *("What a rank has of a tensor.", "Of sums of parts of groups.", "That of the row.", "The same, for one row."),
        *("It is another rank's.", "By name.", "Who has sent bytes.", "Also where it has ended before.", "Only now."),
        *("Until then a server may have it.", "Whether idle.", "Load it; nothing of it may count.", "Those of a row."),
    ],
)
def test_openings_without_a_noun_are_refused(text: str) -> None:
    assert LINT["is_refused"](text)


@pytest.mark.parametrize(
    "text",
    [
        *("Part of a tensor on one rank.", "Whether a server has the version.", "The samples of one rank."),
        *(
            "Item of a list.",
            "In the terminal",
            "Byte-wise difference.",
            "Thread of one tracker.",
            "Whether it is idle.",
        ),
    ],
)
def test_nouns_and_verbs_are_accepted(text: str) -> None:
    assert not LINT["is_refused"](text)


def test_docstrings_are_those_of_modules_classes_functions_and_attributes() -> None:
    found = list(LINT["docstrings"](ast.parse(MODULE)))
    assert sorted(found) == [
        (1, "Module."),
        (3, "Of a file."),
        (5, "What a table has."),
        (7, "That of the row."),
        (9, "Close the row."),
    ]


def test_files_are_searched_and_code_blocks_of_pages_are_not(tmp_path: Path) -> None:
    (tmp_path / "row.py").write_text(MODULE + '    def wait(self):\n        """Before a step."""\n')
    (tmp_path / "page.md").write_text("# Page\n\n```bash\n# What is run\n```\n\n## What it says\n\n## On one GPU\n")
    found = [(one.path.name, one.line) for one in LINT["findings"]([tmp_path])]
    assert found == [("page.md", 7), ("row.py", 3), ("row.py", 5), ("row.py", 7), ("row.py", 12)]
    assert LINT["main"](["--list", str(tmp_path)]) == 0
    assert LINT["main"]([str(tmp_path)]) == 1
