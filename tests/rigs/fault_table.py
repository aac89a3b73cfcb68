"""Engines and servers with a fault, each in a real run: when it is found, by which check, and in which words.

`python -m tests.rigs.fault_table [--vllm]` prints the table; `--write FILE` keeps it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from asyncrl.config.schema import RunConfig
from tests.rigs.ports import own_port
from tests.rigs.prefork import Service
from tests.rigs.small_runs import logs, small
from tests.rigs.two_processes import start, with_ports, write_config
from tests.rigs.waiting import exit_codes

MakeConfig = Callable[..., RunConfig]
HEADING = """# Faults of engines

Each fault in a real run of a tiny vision-language model: learner, a good server and a faulty one, the `hf` engine on a
CPU in float32. Made by `python -m tests.rigs.fault_table --vllm --write docs/lab-log/engine-faults.md`; the
injections are in `tests/rigs/faulty_server.py`, and `tests/system/test_engine_faults.py` keeps the table true. A server
that is refused is sent away, what it holds goes to the others, and the run goes on;
where it is the only one, the run stops with the message and exit code 3. Step N publishes version N:
what is found at version 1 has sampled one step. On policy no token of the faulty policy is trained; off
policy what the server delivers before the verdict is, with the correction.

At ca9c4c71, without checks after updates: a stale prefix cache was found by nothing until a training prompt came again;
weights or an adapter that were not updated were a warning of step 2 on policy, without the cause, and nothing off
policy, where no token is of the learner's own version. Each of these runs went on to its end.
"""
TEMPLATE, PIXELS = "another template", "other pixel limits"
BLIND, PREFIX = "image-blind engine", "stale prefix cache after an update"
ADAPTER, WEIGHTS = "adapter not applied", "weights not updated"
FAULTS = {BLIND: "blind", PREFIX: "prefix", ADAPTER: "adapter", WEIGHTS: "weights"}
"""Names of injections of `tests.rigs.faulty_server` by the fault's name."""


@dataclass(frozen=True)
class Found:
    """End of a faulty server."""

    fault: str
    version: int | None
    """Policy version of the check that found it; None: it was not welcomed."""
    reason: str
    """Refusal that the server was sent."""
    run: int
    """Exit code of the learner."""
    steps: int
    """Steps that the run has made."""

    @property
    def when(self) -> str:
        if self.version is None:
            return "at its hello"
        return f"version {self.version}" if self.version else "as it joins, before step 1"

    @property
    def check(self) -> str:
        if self.version is None:
            return "fingerprint of the processor"
        return "log-probs of the parity rows" + (", again after an update" if self.version else "")


class FaultyRun:
    """A learner and servers that are started one after the other, each with a log of its own."""

    def __init__(self, config: RunConfig, folder: Path, *, of_this: bool = False):
        """`of_this`: processes are forks of this one."""
        self.config, self.folder = with_ports(config), folder
        self._start = partial(start, of_this=of_this)
        self.learner = self._start("learner", write_config(self.config, folder))
        self.faulty: dict[str, Service] = {}
        self.good: list[Service] = []

    def add_good(self) -> None:
        self.good.append(self._start("rollout_server", self._config_in(self.folder / "good")))

    def _config_in(self, folder: Path) -> Path:
        """The run's configuration for one server, whose log is beside it."""
        telemetry = self.config.telemetry.model_copy(update={"rollout_port": own_port()})
        return write_config(self.config.model_copy(update={"telemetry": telemetry}), folder)

    def add(self, fault: str) -> Service:
        file = self._config_in(self._of(fault))
        if fault == PIXELS:
            service = self._start("rollout_server", file, "model.max_pixels=3136")
        elif fault == TEMPLATE:
            service = self._start("rollout_server", file, f"model.path={self._other_template()}")
        else:
            service = self._start("tests.rigs.faulty_server", file, FAULTS[fault])
        self.faulty[fault] = service
        return service

    def _of(self, fault: str) -> Path:
        return self.folder / fault.replace(" ", "-")

    def _other_template(self) -> Path:
        """The model with one more space in its chat template."""
        other = self.folder / "other-template"
        shutil.copytree(self.config.model.path, other)
        template = other / "chat_template.jinja"
        template.write_text(template.read_text().replace("{%- ", " {%- ", 1) + " ")
        return other

    def end(self) -> list[Found]:
        timeout_s = 120.0 if self.config.rollout.engine == "hf" else 900.0
        code, *_ = exit_codes([self.learner, *self.good, *self.faulty.values()], timeout_s)
        metrics = self.folder / "metrics.jsonl"
        steps = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        return [self._found(fault, code, steps) for fault in self.faulty]

    def _found(self, fault: str, code: int, steps: int) -> Found:
        told = re.search(r"the learner refuses this server: (.*)", logs(self._of(fault), whole=True))
        assert told, f"{fault} was not found\n{logs(self.folder)}\n{logs(self._of(fault))}"
        at = re.search(r"policy version (\d+)", told[1])
        return Found(fault, int(at[1]) if at else None, told[1], code, steps)


def faults_from_the_start(make_config: MakeConfig, folder: Path, **settings: Any) -> list[Found]:
    """Servers that never get work: the last one, the only one that is welcome, ends the run."""
    run = FaultyRun(small(make_config), folder, **settings)
    exit_codes([run.add(TEMPLATE), run.add(PIXELS)])
    run.add(BLIND)
    return run.end()


def faults_of_updates(
    make_config: MakeConfig, folder: Path, faults: Sequence[str], *, rank: int = 0, alone: bool = False, **settings: Any
) -> list[Found]:
    """Servers that are right at version 0, beside a good one unless `alone`. An adapter of `rank`, or all weights."""
    learner = settings.pop("learner", {})
    config = small(make_config, model={"lora": {"rank": rank}}, learner=learner, trainer={"max_steps": 4})
    run = FaultyRun(config, folder, **settings)
    for fault in faults:
        run.add(fault)
    if not alone:
        run.add_good()
    return run.end()


def table(found: Iterable[tuple[str, Found]]) -> str:
    """Markdown, of the settings of each run and what was found in it."""
    lines = ["| fault | run | found | by | message | the run |", "|---|---|---|---|---|---|"]
    for settings, one in found:
        ends = "goes on with the good server" if one.run == 0 else "stops: it is the only server"
        if one.version is None:
            ends = "waits for a server, and says so"
        lines.append(f"| {one.fault} | {settings} | {one.when} | {one.check} | {shortened(one.reason)} | {ends} |")
    return "\n".join(lines) + "\n"


def shortened(reason: str) -> str:
    """First words of a refusal, without names of servers and advice."""
    said = re.sub(r"^server '[^']*' (is refused: )?", "", reason)
    said = re.sub(r"fingerprint [0-9a-f]{8}[0-9a-f]*", "fingerprint …", said)
    said = re.sub(r"learner's is [0-9a-f]{8}[0-9a-f]*", "learner's is …", said)
    return re.split(r", over \d+ tokens|\. Use the same", said)[0].replace("|", "\\|")


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", action="store_true", help="also of the vllm engine (a minute of CPU)")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args(list(arguments) if arguments is not None else None)
    from tests.conftest import small_config
    from tests.rigs.tiny import make_digits, make_tiny_model

    found: list[tuple[str, Found]] = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        parts = make_tiny_model(root / "model"), make_digits(root / "data")

        def make(run: str) -> MakeConfig:
            return partial(small_config, *parts, root / run)

        found += [("any", one) for one in faults_from_the_start(make("start"), root / "start")]
        number = 0
        for staleness, lr in ((0, 1e-3), (2, 1e-3), (2, 1e-6)):
            learner = {"max_staleness": staleness, "optim": {"lr": lr, "weight_decay": 0.0}}
            for rank, faults in ((0, [PREFIX, WEIGHTS]), (4, [ADAPTER])):
                number += 1
                run = f"updates-{number}"
                said = f"staleness {staleness}, learning rate {lr:g}" + (", LoRA" if rank else "")
                there = faults_of_updates(make(run), root / run, faults, rank=rank, learner=learner)
                found += [(said, one) for one in there]
        if given.vllm:
            FAULTS[WEIGHTS] = "vllm_weights"
            make_vllm = partial(make("vllm"), rollout={"engine": "vllm"})
            there = faults_of_updates(make_vllm, root / "vllm", [WEIGHTS], alone=True)
            found += [("vllm, staleness 0, learning rate 0.001", one) for one in there]
    text = table(found)
    print(text)
    if given.write:
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}, {date.today():%d %B %Y}"
        given.write.write_text(f"{HEADING}\n{versions}.\n\n{text}")


if __name__ == "__main__":
    main()
