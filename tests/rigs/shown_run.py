"""A run directory as displays and commands read it."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from asyncrl.telemetry.recorder import RunRecorder

STEP = {
    "reward/exact_match": 0.2,
    "loss": 0.0123,
    "grad_norm": 1.5,
    "entropy": 0.9,
    "lr": 1e-5,
    "staleness/mean": 0.8,
    "staleness/max": 2,
    "idle/learner": 0.25,
    "tokens_per_s/learner": 5000.0,
    "rows/finished": 60,
    "rows/error": 3,
    "step_s": 2.0,
}


def write_run(folder: Path, steps: int = 40) -> RunRecorder:
    recorder = RunRecorder(folder)
    (folder / "config.yaml").write_text("algorithm: {policy_loss: gspo}\ncritic: {warmup_steps: 60}\n")
    for step in range(1, steps + 1):
        recorder.step({"step": step, "version": step, "reward/mean": step / 100, **STEP})
    recorder.evaluation({"step": 0, "version": 0, "accuracy": 0.125, "reward": 0.1, "rows": 16, "errors": 0})
    recorder.evaluation({"step": 40, "version": 40, "accuracy": 0.875, "reward": 0.8, "rows": 16, "errors": 1})
    completions = [
        {"text": "it is seven", "reward": 1.0},
        {"text": "it is \x1b[2J\x1b[31mnine", "reward": 0.0},
        {"text": "never scored", "reward": None},
    ]
    recorder.sample({"step": 40, "prompt": "which digit?", "answer": "7", "completions": completions}, {})
    recorder.status(
        phase="training",
        waiting_for="groups of step 41 (needs 8, has 3)",
        total_steps=100,
        version=40,
        servers=[{"id": "a", "version": 39}],
        groups={"in_flight": 12, "buffered": 3},
        errors={"reward_timeout": 3},
    )
    return recorder


def write_configured_run(config: RunConfig) -> Path:
    """A run with the files that commands look for; returns its folder."""
    run = config.run_path
    write_run(run)
    (run / "config.yaml").write_text(dump_config(config))
    (run / "journal.sqlite").touch()
    return run


def close_off(path: Path) -> None:
    """Make a file or folder unreadable for anybody, root included: a link to itself, in place of another user's."""
    if path.is_dir():
        path.rename(path.with_name(f"{path.name}.before"))
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def check_told(said: str, path: Path) -> None:
    """One line names the path, and a fix."""
    assert said.startswith(f"error: cannot read {path}: Too many levels of symbolic links. Restore it, make it"), said
    assert said.count("\n") == 1
