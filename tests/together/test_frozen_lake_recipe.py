"""FrozenLake's recipe, in small: warm start, then the two services play gymnasium's pictures and train."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from asyncrl.demo import model
from tests.rigs.small_runs import logs
from tests.rigs.tiny import ROOT
from tests.rigs.two_processes import run_both, start, write_config
from tests.rigs.waiting import exit_codes
from tests.system.test_end_to_end import lines

pytestmark = pytest.mark.slow
pytest.importorskip("gymnasium", reason="the package gymnasium is not installed (the extra `gymnasium`)")
pytest.importorskip("pygame", reason="pygame, which draws the lake, is not installed (the extra `gymnasium`)")
FOLDER = ROOT / "examples" / "frozen_lake"


def test_the_recipe_trains_on_pictures_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--out", str(tmp_path), "--moves", "16"])
    runpy.run_path(str(FOLDER / "prepare.py"), run_name="__main__")
    (size,) = re.findall(r"asyncrl\.demo\.model --out \S+ (.+\n# .+)\n", (FOLDER / "sft.yaml").read_text())
    model.main(["--out", str(tmp_path / "model"), *shlex.split(size.replace("\n#", ""))])

    warm, run = tmp_path / "sft", tmp_path / "gigpo"
    small = [f"run_dir={warm}", f"model.path={tmp_path}/model", f"data.train_files=[{tmp_path}/sft.jsonl]"]
    config = load_config(FOLDER / "sft.yaml", [*small, "sft.steps=2", "sft.rows_per_step=8"])
    assert exit_codes([start("asyncrl_plugins.sft.run", write_config(config, warm))], 120) == [0], logs(warm)

    small = [f"run_dir={run}", f"model.path={warm}/export", f"data.train_files=[{tmp_path}/rl.jsonl]"]
    small += [f"data.val_files=[{tmp_path}/eval.jsonl]", "data.max_val_rows=2", "trainer.max_steps=2"]
    config = load_config(FOLDER / "gigpo.yaml", [*small, "batch.prompts_per_step=2", "batch.group_size=2"])
    assert run_both(config, run) == (0, 0), logs(run)
    steps = lines(run / "metrics.jsonl")
    assert [step["env/error_rate"] for step in steps] == [0.0, 0.0]
    assert steps[0]["logprob_diff_max"] < 1e-4, "the second step may be of stale tokens"
    assert min(step["env/turns"] for step in steps) >= 1.0
