"""The commands of the documentation: found, read, and run on a small run of the demo."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.load import dump_config, load_config
from asyncrl.launch.ports import free_port

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docker" / "README.md", *sorted((ROOT / "docs").glob("*.md")))
NEEDS = ("gpu", "docker", "cluster", "network", "browser")
AS_SUCH = ("make demo", "make test")
"""Not run here: they make environments and take minutes. `make test` is run by .ci/run, and tests/system/test_demo.py
runs what `make demo` does in small."""
BLOCK_TIMEOUT_S = 300
TOO_LONG = 124
"""Exit code of a block that was still running then, as of timeout(1)."""
_FENCE = re.compile(r"(?:^<!-- needs: (?P<needs>[\w ]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
_SHELL = re.compile(r"^\s*(?:\$ )?(?:\.venv/bin/)?(?:asyncrl|make|docker|python3?|pip|sbatch|kubectl) ", re.M)
_DEMO_STEPS = 3


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    text: str
    needs: str
    """One of NEEDS, or empty: it runs anywhere."""

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runnable(self) -> str:
        """The text without the commands of AS_SUCH."""
        return "\n".join(line for line in self.text.splitlines() if not line.startswith(AS_SUCH)) + "\n"


def blocks(page: Path) -> list[Block]:
    """Every block of commands. ValueError for commands in a fence that is not `bash`, which nobody would run."""
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("text"))
        language, body = match["language"], match["text"]
        if language == "bash":
            found.append(Block(page, line, body, match["needs"] or ""))
        elif language in ("", "sh", "shell", "console", "text") and _SHELL.search(body):
            raise ValueError(f"{page.name}:{line}: commands in a ```{language} fence are never run: make it ```bash")
    return found


def prepare(folder: Path, model: Path, data: Path) -> None:
    """What a user has after `make demo`, smaller: `runs/demo-1` with data, a model and a run that has ended."""
    for name in ("configs", "examples", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    for name, target in (("asyncrl", "-m asyncrl"), ("python", "")):
        for place in (folder / "bin" / name, folder / ".venv" / "bin" / name):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(f'#!/bin/sh\nexec "{sys.executable}" {target} "$@"\n')
            place.chmod(0o755)
    demo = folder / "runs" / "demo-1"
    shutil.copytree(data, demo / "data")
    shutil.copytree(model, demo / "sft" / "export")
    small = [
        *("run_dir=runs/demo-1/grpo", "model.path=runs/demo-1/sft/export"),
        *("data.train_files=[runs/demo-1/data/rl.parquet]", "data.val_files=[runs/demo-1/data/eval.parquet]"),
        *("batch.prompts_per_step=4", "batch.group_size=4", "batch.tokens_per_microbatch=512"),
        *("data.max_response_length=8", f"trainer.max_steps={_DEMO_STEPS}", "trainer.save_freq=2"),
        *("learner.cpu_threads=1", "rollout.cpu_threads=1", "network.heartbeat_s=0.2", "data.max_val_rows=4"),
        *("network.control_port=0", "network.weights_port=0", "telemetry.learner_port=0", "telemetry.rollout_port=0"),
    ]
    code, printed = run(folder, f"asyncrl train configs/digits_grpo.yaml {' '.join(small)}\n")
    assert code == 0, printed


def copy_for_page(prepared: Path, folder: Path) -> None:
    """A workspace of its own, with ports of its own: pages run side by side."""
    shutil.copytree(prepared, folder, symlinks=True)
    ports = [
        f"{key}={free_port()}"
        for key in ("network.control_port", "network.weights_port", "telemetry.learner_port", "telemetry.rollout_port")
    ]
    config = folder / "runs" / "demo-1" / "grpo" / "config.yaml"
    config.write_text(dump_config(load_config(config, ports)))


def run(folder: Path, text: str) -> tuple[int, str]:
    """A block as bash runs it: it ends at the first command that fails. Returns its exit code and what it printed.

    Whatever it started ends with it.
    """
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
    }
    output = folder / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(BLOCK_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = TOO_LONG
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # the launcher stops its services, which have sessions of theirs
            process.wait()
    return code, output.read_text()


def run_pages(prepared: Path, folder: Path, pages: Sequence[Path]) -> list[tuple[Block, int, str, float]]:
    """Exit code, output and seconds of each block of the pages that runs anywhere, in order, up to one that fails.

    A command that a page before has run in this folder is not repeated: README trains as docs/quickstart.md does.
    """
    copy_for_page(prepared, folder)
    results: list[tuple[Block, int, str, float]] = []
    seen: set[frozenset[str]] = set()
    for block in (block for page in pages for block in blocks(page) if not block.needs and block.runnable.strip()):
        started = time.monotonic()
        code, printed = run(folder, _without(seen, block.runnable))
        results.append((block, code, printed, time.monotonic() - started))
        if code:
            break
    return results


def _without(seen: set[frozenset[str]], text: str) -> str:
    """The text without `asyncrl` commands on a line of their own that were seen before, in any order of their words."""
    lines = []
    for line in text.splitlines(keepends=True):
        words = shlex.split(line, comments=True) if re.match(r"(\.venv/bin/)?asyncrl .*[^&\\]$", line) else []
        command = frozenset(words[1:])
        if not words or command not in seen:
            lines.append(line)
        seen |= {command} if words else set()
    return "".join(lines)
