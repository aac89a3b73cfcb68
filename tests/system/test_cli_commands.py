"""The commands as a user runs them, with a tiny model and real services."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from asyncrl.cli import main
from asyncrl.config.load import dump_config, load_config
from asyncrl.config.schema import RunConfig
from asyncrl.data.dataset import open_train
from asyncrl.data.prompts import PromptRenderer
from asyncrl.processing.processor import PromptProcessor
from asyncrl.run_folder.lock import LEARNER_LOCK
from tests.rigs.tiny import ROOT
from tests.rigs.two_processes import start_command
from tests.rigs.waiting import wait_until


@pytest.fixture
def config_file(make_config: Callable[..., RunConfig], tmp_path: Path) -> Callable[..., Path]:
    """Writes a configuration next to the run directory."""

    def write(**sections: dict) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(dump_config(make_config(**sections)))
        return path

    return write


def logs(run: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(run.glob("logs/*.log")))


def test_dry_run_shows_what_would_run_and_writes_nothing(
    config_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config_file()), "--dry-run", "batch.group_size=6"]) == 0
    printed = capsys.readouterr().out
    assert "group_size: 6" in printed, "what differs from the defaults"
    assert "trajectories per step" in printed, "the batch numbers"
    assert "first prompt" in printed
    assert "<|vision_start|>" in printed, "as the chat template writes it"
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert "note: this machine" not in printed
    assert main(["train", str(config_file()), "--dry-run", "learner.device=cuda:99"]) == 0
    assert "note: this machine cannot train it: learner.device is cuda:99" in capsys.readouterr().out
    assert main(["train", str(config_file()), "--dry-run", "gpu_memory.budget_gib=4"]) == 0
    assert "first prompt" in capsys.readouterr().out
    assert main(["train", str(config_file()), "--dry-run", "gpu_memory.budget_gib=0.005"]) == 2
    assert "gpu_memory.budget_gib is 0.005" in capsys.readouterr().err


NEVER_LOADED = {
    "sklearn",
    "scipy",
    "pandas",
    "accelerate",
    "sympy",
    "triton",
    "torch._dynamo",
    "transformers.modeling_utils",
}
LOOK_AND_ENCODE = """
import sys
from asyncrl.cli import main
config, *never_loaded = sys.argv[1:]
code = main(["train", config, "--dry-run"])
print(code, sorted(set(never_loaded) & set(sys.modules)))
from tests.system.test_cli_commands import first_encoded
print(*first_encoded(config))
"""


def first_encoded(config_file: str) -> tuple[str, str]:
    """Fingerprint of the processor, and hash of the first row's token ids and pixels."""
    config = load_config(Path(config_file))
    rows, processor = open_train(config.data), PromptProcessor(config.model)
    rendered = PromptRenderer(config.data).render(rows[0], rows.row_id(0))
    encoded = processor.encode(rendered.prompt, rendered.blobs)
    assert encoded.pixel_values is not None
    pixels = encoded.pixel_values.numpy().tobytes()
    return processor.fingerprint, hashlib.sha256(encoded.token_ids.tobytes() + pixels).hexdigest()


def test_dry_run_imports_half_of_what_a_run_does_and_encodes_the_same(config_file: Callable[..., Path]) -> None:
    """Those packages took half of its time; without them tokens and pixels must be those of the run."""
    config = str(config_file())
    command = [sys.executable, "-c", LOOK_AND_ENCODE, config, *NEVER_LOADED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    looked, encoded = done.stdout.splitlines()[-2:]
    assert looked == "0 []", done.stderr
    assert encoded == " ".join(first_encoded(config))


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("algorithm.adv_estimator=gpro", "Did you mean 'grpo'?"),
        ("algorithm.policy_loss={folder}/mine.py:los", "has no function 'los'. Did you mean 'loss'?"),
        ("algorithm.policy_loss=dapo", "Write the word `dapo` behind the configuration"),
        ("algorithm.policy_loss={folder}/mine.py", "mine.py:FUNCTION; it has loss"),
        ("reward.functions.0.function=exact_mach", "Did you mean 'exact_match'?"),
        ("reward.functions.0.function={folder}/mine.py:reward", "No module named 'not_installed'"),
    ],
)
def test_dry_run_refuses_functions_and_columns_that_the_run_could_not_load(
    config_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], mistake: str, told: str
) -> None:
    mine = "def loss(tokens, config): ...\nreward = loss\n"
    (tmp_path / "mine.py").write_text(mine if "los" in mistake else f"import not_installed\n{mine}")
    assert main(["train", str(config_file()), "--dry-run", *mistake.format(folder=tmp_path).split()]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert not said.out


def test_dry_run_looks_at_a_sample_of_the_rows(
    config_file: Callable[..., Path], digits_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts of the digits have 26 or 27 tokens: an overlong first row is left out, and refused under `stop`."""
    table = pq.read_table(digits_data / "rl.parquet")
    pq.write_table(table.take([1, 0, *range(2, len(table))]), tmp_path / "rl.parquet")
    config, limit = str(config_file(data={"train_files": [str(tmp_path / "rl.parquet")]})), "data.max_prompt_length=26"
    rows = open_train(load_config(Path(config)).data)
    assert main(["train", config, "--dry-run", limit]) == 0
    printed = capsys.readouterr().out
    shown = re.search(r"first prompt \((\S+)\)", printed)
    assert shown
    assert shown[1] != rows.row_id(0)
    counted = re.search(
        r"(\d+) of 64 training rows cannot be used:\n- row rl.parquet:0: the prompt has 27 tokens", printed
    )
    assert counted
    assert "training rows: 64 of 64 were looked at" in printed
    assert f"{64 - int(counted[1])} training rows / prompts_per_step" in printed
    for settings in ([limit, "data.on_bad_row=stop"], ["data.max_prompt_length=5"]):
        assert main(["train", config, "--dry-run", *settings]) == 2
        assert "training rows can" in capsys.readouterr().err


def finish(*arguments: str, log: Path) -> tuple[int, str]:
    """Exit code of a command, and what it printed."""
    code = start_command(*arguments, log=log).wait(timeout=120)
    return code, log.read_text()


@pytest.mark.slow
def test_a_whole_run_tells_its_story_in_plain_lines_and_is_exported(
    config_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    host = {"host": "::1"}  # IPv6 is an address as any
    config = config_file(evaluation={"before_training": True}, network=host, telemetry=host)
    log = tmp_path / "train.log"
    code, printed = finish("train", str(config), log=log)
    assert code == 0, printed + logs(run)
    assert "\x1b" not in printed
    assert "tcp://[::1]:" in logs(run)
    assert "step 3 of 3: reward" in printed
    assert "held-out accuracy" in printed.splitlines()[-4]
    assert "->" in printed.splitlines()[-4], "before and after"
    for name in ("export/config.json", "metrics.jsonl", "samples.jsonl", "logs/learner.log", "logs/rollout_server.log"):
        assert (run / name).exists(), name

    assert main(["train", str(config)]) == 2, "a second run would overwrite it"
    assert "Continue it with --resume" in capsys.readouterr().err

    made_with = (run / "config.yaml").read_bytes()
    code, printed = finish("train", str(run / "config.yaml"), "--resume", "batch.group_size=2", log=log)
    assert (code, "batch.group_size" in printed) == (2, True), printed
    assert (run / "config.yaml").read_bytes() == made_with, "a refused --resume changes nothing"

    assert main(["export", str(run), str(tmp_path / "copy"), "--checkpoint", "2"]) == 2
    assert "has those of [3]" in capsys.readouterr().err
    assert main(["export", str(run), str(tmp_path / "copy")]) == 0
    assert (tmp_path / "copy" / "model.safetensors").read_bytes() == (run / "export" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("side", ["learner", "rollout_server-1"])
def test_a_killed_side_is_started_again_and_the_run_finishes(
    config_file: Callable[..., Path], tmp_path: Path, side: str
) -> None:
    run, log, steps = tmp_path / "run", tmp_path / "train.log", 40
    # So many steps that the other server does not finish the run within the second before a restart.
    sections = {"trainer": {"max_steps": steps, "save_freq": 5}}
    command = start_command("train", str(config_file(**sections, rollout={"servers": 2})), log=log)
    try:
        wait_until((run / "metrics.jsonl").exists, "the first step", run / "logs")
        learner = int((run / LEARNER_LOCK).read_text())
        children = psutil.Process(command.pid).children()
        servers = [process for process in children if process.pid != learner]
        victim = psutil.Process(learner) if side == "learner" else min(servers, key=lambda process: process.pid)
        victim.kill()
        code = command.wait(timeout=120)
    finally:
        command.kill()
    printed = log.read_text()
    assert code == 0, printed + logs(run)
    assert "was killed by SIGKILL (out of memory?); restart 1 of 5 in 1 s" in printed
    assert f"started again: {side} 1" in printed
    done = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert done == list(range(1, steps + 1)), "each step once"
    assert not (run / "failure.json").exists()
