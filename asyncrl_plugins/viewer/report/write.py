"""The command `asyncrl report`: read run directories, and write one file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from asyncrl.errors import UserError
from asyncrl.telemetry.jsonl import write_atomically
from asyncrl_plugins.viewer.report.comparison import page_of_many
from asyncrl_plugins.viewer.report.page import page_of
from asyncrl_plugins.viewer.report.reading import read_run

FILE = "report.html"


def write_report(run_dirs: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page of a run into its directory, or of several into the working directory; prints the place."""
    began = time.monotonic()
    runs = [read_run(path) for path in run_dirs]
    page = page_of(runs[0]) if len(runs) == 1 else page_of_many(runs)
    target = output or (run_dirs[0] / FILE if len(runs) == 1 else Path(FILE))
    data = page.encode(errors="backslashreplace")
    write_file(target, data, "-o")
    print(f"{target}  {len(data) / 1e6:.1f} MB, {time.monotonic() - began:.1f} s")
    return target


def write_file(target: Path, data: bytes, option: str) -> None:
    """Write the whole file or none. Raises UserError where it cannot be written; `option` names another."""
    try:
        write_atomically(target, data, durable=False)
    except OSError as problem:
        raise UserError(f"cannot write {target}: {problem.strerror}. Name another file with {option}") from None
