"""Record of the device's use by both services, kept by the engines and not by the lease.

    python -m tests.rigs.device_witness --config CONFIG MODULE [arguments]

Runs the service MODULE and writes uses.jsonl beside CONFIG. The methods of its engine that touch the device are
replaced by the same methods between two lines, `begin` and `end` in seconds of CLOCK_MONOTONIC, which all processes of
a machine share. A process that is killed leaves a `begin` without an `end`.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.weights import Publication

LEARNER_USES = ("prepare", "forward", "backward", "optimizer_step", "files", "sleep", "wake")
SERVER_USES = ("_load", "_load_weights", "_fall_asleep", "_wake_up")
USES_FILE = "uses.jsonl"
BATCH_USES = ("prefill", "join", "step", "rebuild_cache")


@dataclass(frozen=True)
class Use:
    """Use of the device by one process; `end` is None if the process died."""

    side: str
    pid: int
    name: str
    begin: float
    end: float | None


def watch(owner: type, names: Iterable[str], side: str, file: Path) -> None:
    for name in names:
        setattr(owner, name, _between_lines(getattr(owner, name), name, side, file))


def _between_lines(function: Callable[..., Any], name: str, side: str, file: Path) -> Callable[..., Any]:
    def note(event: str) -> None:
        line = {"side": side, "pid": os.getpid(), "name": name, "event": event, "monotonic": time.monotonic()}
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(fd, (json.dumps(line) + "\n").encode())
        os.close(fd)

    def noted(*arguments: Any, **named: Any) -> Any:
        note("begin")
        try:
            return function(*arguments, **named)
        finally:
            note("end")

    return noted


def read_uses(file: Path) -> list[Use]:
    """Uses, in order of their begins. Those of one process nest."""
    open_uses: dict[int, list[dict[str, Any]]] = defaultdict(list)
    uses: list[Use] = []
    for text in file.read_text().splitlines():
        line = json.loads(text)
        if line["event"] == "begin":
            open_uses[line["pid"]].append(line)
        else:
            begun = open_uses[line["pid"]].pop()
            assert begun["name"] == line["name"]
            uses.append(Use(line["side"], line["pid"], line["name"], begun["monotonic"], line["monotonic"]))
    for left in open_uses.values():
        uses += [Use(line["side"], line["pid"], line["name"], line["monotonic"], None) for line in left]
    return sorted(uses, key=lambda use: use.begin)


def main() -> None:
    _, option, config, module, *arguments = sys.argv
    sys.argv = [module, option, config, *arguments]
    file = Path(config).with_name(USES_FILE)
    if module == "learner":
        from learner.training.engine import TorchEngine

        watch(TorchEngine, LEARNER_USES, module, file)
        watch(Publication, ("publish",), module, file)
    else:
        from rollout_server.engines.hf.decode_batch import DecodeBatch
        from rollout_server.engines.hf.engine import HFEngine

        watch(HFEngine, SERVER_USES, module, file)
        watch(DecodeBatch, BATCH_USES, module, file)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
