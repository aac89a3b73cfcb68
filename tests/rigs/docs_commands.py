"""The commands of the documentation: found, read, and run on a small run of the demo."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.load import load_config
from asyncrl.launch.ports import free_port
from tests.rigs.prefork import fork_module
from tests.rigs.small_runs import logs
from tests.rigs.tiny import GRPO
from tests.rigs.two_processes import start, with_ports, write_config
from tests.rigs.waiting import exit_codes

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "docker" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "asyncrl_plugins").glob("*/*.md")),
)
NEEDS = ("gpu", "docker", "cluster", "network", "browser")
NOT_RUN = {
    "make demo": "tests/system/test_demo.py",
    "make test": ".ci/run",
    "asyncrl demo rloo": "tests/system/test_overlay_steps.py",
    "asyncrl train base.yaml": "tests/unit/asyncrl/test_config_load.py",
    "asyncrl train runs/demo-1/grpo/config.yaml learner.optim": "README.md",
    "asyncrl train runs/demo-1/grpo/config.yaml run_dir=runs/two-ranks": "tests/system/test_ranks.py",
    "asyncrl train runs/mine/config.yaml --resume": "tests/system/test_resume.py",
    "asyncrl sync": "tests/system/test_sync.py",
    "asyncrl eval": "tests/plugins/evaluation/test_run_scores.py",
    "asyncrl export": "tests/system/test_cli_commands.py",
    "asyncrl rollout": "tests/system/test_curve_end_to_end.py",
    "asyncrl learn": "tests/system/test_curve_end_to_end.py",
    "asyncrl replay": "tests/plugins/replay/test_replay.py",
    "python examples/modular_digits.py": "tests/together/test_modular.py",
    "python examples/frozen_lake/prepare.py": "tests/plugins/gymnasium/test_frozen_lake_example.py",
    "python -m asyncrl.demo.model --out runs/frozen_lake": "tests/together/test_frozen_lake_recipe.py",
    "asyncrl sft examples/frozen_lake": "tests/together/test_frozen_lake_recipe.py",
    "asyncrl train examples/frozen_lake": "tests/together/test_frozen_lake_recipe.py",
    "asyncrl env": "tests/together/test_environment_examples.py",
    "asyncrl doctor --plan": "tests/plugins/doctor/test_plan_table.py",
    "asyncrl doctor": "tests/plugins/doctor/test_doctor.py",
}
"""Beginnings of commands that are not run here, and the file that runs such a command, in small."""
BLOCK_TIMEOUT_S = 300
TOO_LONG = 124
"""Exit code of a block that was still running then, as of timeout(1)."""
_FENCE = re.compile(r"(?:^<!-- needs: (?P<needs>[\w ]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
_SHELL = re.compile(r"^\s*(?:\$ )?(?:\.venv/bin/)?(?:asyncrl|make|docker|python3?|pip|sbatch|kubectl) ", re.M)
_DEMO_STEPS = 3
FORKED = f"""#!{sys.executable} -ES
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as forks:
    forks.connect(os.environ["FORKS"])
    forks.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
    forks.shutdown(socket.SHUT_WR)
    sys.exit(int(forks.recv(8)))"""
"""The command `asyncrl` of the blocks: asks `forks` to run it."""


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
        """The text without the commands of NOT_RUN."""
        lines = self.text.replace("\\\n", " ").splitlines(keepends=True)
        return "".join(line for line in lines if not line.removeprefix(".venv/bin/").startswith(tuple(NOT_RUN)))


def blocks(page: Path) -> list[Block]:
    """Every block of commands. ValueError for commands in a fence that is not `bash`, which would never be run."""
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
    """Files that a user has after `make demo`, smaller: `runs/demo-1` with data, a model and a run that has ended."""
    for name in ("configs", "examples", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    commands = {"asyncrl": f"{FORKED}\n", "python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'}
    for place in (folder / "bin", folder / ".venv" / "bin"):
        place.mkdir(parents=True)
        for name, text in commands.items():
            (place / name).write_text(text)
            (place / name).chmod(0o755)
    demo = folder / "runs" / "demo-1"
    shutil.copytree(data, demo / "data")
    shutil.copytree(model, demo / "warm_start")
    small = [
        *("run_dir=runs/demo-1/grpo", "model.path=runs/demo-1/warm_start"),
        *("data.train_files=[runs/demo-1/data/rl.parquet]", "data.val_files=[runs/demo-1/data/eval.parquet]"),
        *("batch.prompts_per_step=4", "batch.group_size=4", "batch.tokens_per_microbatch=512"),
        *("data.max_response_length=8", f"trainer.max_steps={_DEMO_STEPS}", "trainer.save_freq=2"),
        *("learner.cpu_threads=1", "rollout.cpu_threads=1", "network.heartbeat_s=0.2", "data.max_val_rows=4"),
    ]
    with contextlib.chdir(folder):
        file = write_config(with_ports(load_config(GRPO, small), free_port), folder / "logs")
        codes = exit_codes([start("learner", file), start("rollout_server", file)])
    assert codes == [0, 0], logs(folder / "logs")
    (folder / "runs" / "zoom-1").symlink_to("demo-1")  # that of `make demo-agent`, for commands that look at a run


@contextlib.contextmanager
def forks(output: Path) -> Iterator[str]:
    """Socket on which a thread takes commands, forks each (see tests/rigs/prefork.py) and answers its exit code."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection, connection.makefile("rb") as file:
                    words, place, environment = json.loads(file.read())
                    command = fork_module("asyncrl", words, output, environment, place)
                    connection.sendall(str(command.wait(BLOCK_TIMEOUT_S)).encode())

    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{short}/forks")
        listening.listen()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"{short}/forks"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(timeout=10)


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
    output.unlink(missing_ok=True)
    with output.open("a") as file, forks(output) as environment["FORKS"]:
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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # the launcher stops its services, which have sessions of theirs
            process.wait()
    return code, output.read_text()


def run_pages(folder: Path, pages: Sequence[Path]) -> list[tuple[Block, int, str, float]]:
    """Exit code, output and seconds of each block of the pages that runs anywhere, in order, up to one that fails.

    A command that a page before has run is not repeated.
    """
    results: list[tuple[Block, int, str, float]] = []
    seen: set[str] = set()
    for block in (block for page in pages for block in blocks(page) if not block.needs and block.runnable.strip()):
        started = time.monotonic()
        lines = [line for line in block.runnable.splitlines(keepends=True) if _command(line) not in seen]
        seen |= {_command(line) for line in lines if line.startswith("asyncrl ")}
        code, printed = run(folder, "".join(lines))
        results.append((block, code, printed, time.monotonic() - started))
        if code:
            break
    return results


def _command(line: str) -> str:
    """The line without its comment."""
    return line.partition("#")[0].strip()
