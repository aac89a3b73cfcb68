"""Every command of the documentation is run, or says what it needs; every name that the pages mention exists.

A block of commands is a ```bash fence. `<!-- needs: gpu -->` on the line before it (or one of NEEDS) marks what cannot
run here: such a block is only read. Commands that another test runs are not run here, see NOT_RUN.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from asyncrl.cli import _parser
from asyncrl.config.keys import all_keys
from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl_plugins.evaluation.environment_files import override
from asyncrl_plugins.vllm.rules import device_problem
from tests.rigs.docs_commands import NEEDS, NOT_RUN, PAGES, ROOT, Block, blocks, prepare, run_pages
from tests.rigs.tiny import GRPO

COMMANDS = {
    name for action in _parser()._actions if isinstance(action, argparse._SubParsersAction) for name in action.choices
}
SECTIONS = set(RunConfig.model_fields)
WITH_COMMANDS = [page for page in PAGES if blocks(page)]
ALL = [block for page in WITH_COMMANDS for block in blocks(page)]
FREE_MAPPINGS = ("rollout.engine_args", "environment.config")
README, QUICKSTART = ROOT / "README.md", ROOT / "docs" / "quickstart.md"


@pytest.mark.slow
def test_the_commands_of_the_documentation_run(tmp_path: Path, tiny_model: Path, digits_data: Path) -> None:
    prepare(tmp_path, tiny_model, digits_data)
    results = run_pages(
        tmp_path, [README, QUICKSTART, *(page for page in WITH_COMMANDS if page not in (README, QUICKSTART))]
    )
    for block, code, _, seconds in results:
        print(f"{block.name}: {seconds:.1f} s, exit code {code}")
    failed = [f"{block.name}: {code}\n{block.text}\n{printed[-3000:]}" for block, code, printed, _ in results if code]
    assert not failed, "\n\n".join(failed)
    ran = {block.name for block, *_ in results}
    assert ran == {block.name for block in ALL if not block.needs and block.runnable.strip()}


def test_blocks_are_found_with_known_needs_and_what_is_not_run_here_exists() -> None:
    assert {README, QUICKSTART} <= set(WITH_COMMANDS)
    assert len(ALL) > 10
    assert {block.needs for block in ALL} <= {"", *NEEDS}
    texts = "".join(block.text for block in ALL)
    for command, file in NOT_RUN.items():
        assert command in texts, f"{command} is in no page now"
        assert (ROOT / file).exists()
    assert "make test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("block", ALL, ids=lambda block: block.name)
def test_commands_are_bash_and_name_what_exists(block: Block) -> None:
    """Check subcommands and keys of all blocks, and whether settings of marked commands fit together."""
    checked = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    for command, *words in _asyncrl_commands(block.text):
        assert command in COMMANDS, command
        overrides = [word for word in words if re.match(r"\w+\.\w", word) and "=" in word]
        if command == "env":
            assert override({"name": "any.py:Any"}, overrides)
            continue
        for word in overrides:
            name = word.partition("=")[0]
            assert name in all_keys() or name.startswith(("reward.functions", *FREE_MAPPINGS)), word
        if block.needs and command in ("train", "sync", "learn", "rollout"):
            mine = GRPO  # README tells to start from it
            config = load_config(mine, [*overrides, *(["trainer.mode=sync"] if command == "sync" else [])])
            assert command == "learn" or device_problem(config) == ""


def _asyncrl_commands(text: str) -> list[list[str]]:
    """Arguments of each `asyncrl` command; here-documents are left out."""
    text = re.sub(r"<<'(\w+)'\n.*?^\1$", "", text, flags=re.M | re.S).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [words[1:] for words in lines if words and Path(words[0]).name == "asyncrl"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_in_the_text_exist(page: Path) -> None:
    """`asyncrl COMMAND`, `make TARGET` and `section.key` between backticks."""
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    keys = set(all_keys())
    places = keys | {".".join(key.split(".")[:end]) for key in keys for end in range(1, key.count(".") + 1)}
    wrong = []
    for text in inline:
        words = text.split()
        known = {"asyncrl": COMMANDS, "make": targets}.get(words[0])
        if known and len(words) > 1 and words[1][0].islower() and words[1] not in known:
            wrong.append(text)
        name = re.split(r"[=:\s]", text)[0].removesuffix(".*")
        if "." in name and name.split(".")[0] in SECTIONS and not _is_a_place(name, places):
            wrong.append(text)
    assert wrong == []


def _is_a_place(name: str, places: set[str]) -> bool:
    is_file = "/" in name or name.endswith((".py", ".yaml", ".md", ".json", ".jsonl", ".secret", ".public"))
    return is_file or name in places or name.startswith((*FREE_MAPPINGS, "reward.functions"))
