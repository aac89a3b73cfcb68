"""`recipes/grpo_in_one_file.py` is the algorithm of `asyncrl train` at staleness 0, bit for bit, on one page."""

from __future__ import annotations

import ast
import asyncio
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.launch.ports import free_port
from asyncrl.models.loading import load_model
from asyncrl.models.published import published_tensors
from asyncrl.telemetry.jsonl import read_lines
from recipes.grpo_in_one_file import Group, Run
from tests.rigs.small_runs import logs
from tests.rigs.tiny import ROOT
from tests.rigs.two_processes import start_command, with_ports, write_config

PAGE = ROOT / "recipes" / "grpo_in_one_file.py"
MOST_LINES = 200
OURS = ("asyncrl", "asyncrl_plugins", "learner", "protocol", "rollout_server")
ALLOWED = (
    "asyncrl.config",
    "asyncrl.data",
    "asyncrl.devices.device",
    "asyncrl.errors",
    "asyncrl.models.loading",
    "asyncrl.processing",
    "asyncrl.rewards.sample",
    "asyncrl.rewards.spec",
    "learner.training.engine",
    "learner.training.packing",
    "protocol.messages",
    "rollout_server.engines.base",
    "rollout_server.engines.hf.engine",
)
"""Modules and packages of ours that the page may import: no estimator, loss, ticket, producer or learner step."""


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("updates", [1, 4])
def test_the_page_equals_asyncrl_train_bit_for_bit(
    make_config: Callable[..., RunConfig], tmp_path: Path, updates: int
) -> None:
    config = make_config(algorithm={"updates_per_batch": updates})
    page, steps = asyncio.run(run_page(config))
    folder = Path(config.run_dir)
    file = write_config(with_ports(config, free_port), tmp_path / "train")
    assert start_command("train", str(file), log=tmp_path / "log").wait(timeout=120) == 0, logs(tmp_path)

    recorded = read_lines(folder / "metrics.jsonl")
    assert len(recorded) == len(steps) == 3
    for line, (groups, metrics) in zip(recorded, steps, strict=True):
        assert {name: line[name] for name in metrics} == metrics
        assert line["reward/mean"] == pytest.approx(sum(sum(group.rewards) for group in groups) / 16)
        assert line["staleness/max"] == 0
        assert line["logprob_diff_max"] < 1e-4  # engine against learner, fp32, with images
    completions = [c for line in read_lines(folder / "samples.jsonl") for c in line["completions"]]
    ours = [c for groups, _ in steps for group in groups for c in group.completions]
    assert [c["token_ids"] for c in completions] == [c.token_ids.tolist() for c in ours]
    exported = load_model(config.model.model_copy(update={"path": str(folder / "export")}), device=torch.device("cpu"))
    theirs, weights = dict(published_tensors(exported)), dict(page.trainer.published_state())
    assert theirs.keys() == weights.keys()
    assert all(torch.equal(theirs[name], weights[name]) for name in weights)


async def run_page(config: RunConfig) -> tuple[Run, list[tuple[list[Group], dict[str, float]]]]:
    run = Run(config)
    return run, [step async for step in run.steps()]


def test_the_page_is_a_page() -> None:
    assert len(PAGE.read_text().splitlines()) <= MOST_LINES


def test_the_page_imports_no_part_of_the_machinery_around_the_algorithm() -> None:
    imports = [node for node in ast.walk(ast.parse(PAGE.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [name for node in imports for name in modules(node) if name.split(".")[0] in OURS]
    assert names
    assert [name for name in names if not any(f"{name}.".startswith(f"{allowed}.") for allowed in ALLOWED)] == []


def modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]


def test_the_page_explains_itself_and_refuses_what_it_does_not_implement(
    make_config: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def end_of(*words: str) -> str | int | None:
        monkeypatch.setattr(sys, "argv", [str(PAGE), *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(PAGE), run_name="__main__")
        return ended.value.code

    refused = end_of(str(write_config(make_config(algorithm={"policy_loss": "gspo"}), tmp_path)))
    assert re.fullmatch("error: this page needs .* Use `asyncrl train` for all else", str(refused))
    assert end_of("--help") is None
    assert "python recipes/grpo_in_one_file.py runs/demo-1/grpo/config.yaml" in capsys.readouterr().out
