"""Run directories as a learner leaves them, with what a test wants to be wrong in them."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

BEGAN, STEP_S = 1_700_000_000.0, 10.0
CONFIG = """\
run_dir: runs/made-up
model: {path: models/tiny}
data: {train_files: [rows.parquet], max_response_length: 64}
batch: {prompts_per_step: 4, group_size: 2}
learner: {max_staleness: 2, optim: {lr: 1.0e-6}}
reward: {functions: [{function: exact_match}]}
trainer: {mode: async}
"""


def step(number: int, **changes: Any) -> dict[str, Any]:
    """A healthy one."""
    at_rest = dict.fromkeys(("rows/truncated", "rows/timed_out", "rows/error", "ledger_residual"), 0.0)
    rising = dict.fromkeys(("reward/mean", "reward/exact_match", "accuracy"), 0.5 + number / 1000)
    clock = {"time": BEGAN + number * STEP_S, "uptime_s": number * STEP_S}
    seconds = {"step_s": 9.0, "wait_s": 2.0, "learn_s": 6.0, "publish_s": 1.0}
    staleness = {"staleness/mean": 0.5, "staleness/max": 2.0, "staleness/bound": 2.0}
    loss = {"loss": 0.01, "grad_norm": 1.0, "lr": 1e-5, "entropy": 0.4, "ess": 0.98, "mismatch_kl_k3": 0.001}
    speed = {"tokens_per_s/learner": 45.0, "tokens_per_s/rollout": 50.0, "idle/learner": 0.25, "idle/rollout": 0.3}
    counts = {"rows/finished": 8.0, "tokens": 400.0, "zero_variance_groups": 1.0, "rss_gib": 1.2}
    numbers = {"step": number, "version": number}
    return numbers | clock | counts | at_rest | rising | staleness | loss | seconds | speed | changes


def completion(text: str, reward: float | None, status: str = "finished", error: str = "") -> dict[str, Any]:
    rewards = {} if reward is None else {"exact_match": reward}
    return {
        "text": text,
        "reward": reward,
        "rewards": rewards,
        "status": status,
        "error": error,
        "finish_reason": "stop",
        "length": len(text.split()),
    }


def sample(number: int, images: list[str], *completions: dict[str, Any], prompt: str = "How many?") -> dict[str, Any]:
    return {
        "step": number,
        "row_id": f"rows.parquet:{number}",
        "prompt": prompt,
        "answer": "2",
        "images": images,
        "videos": [],
        "completions": list(completions),
    }


def image(run: Path, size: tuple[int, int] = (40, 20), colour: str = "navy") -> str:
    """Return the image's hash; the file is in the run directory."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    digest = hashlib.sha256(file.getvalue()).hexdigest()
    (run / "images").mkdir(exist_ok=True)
    (run / "images" / f"{digest}.png").write_bytes(file.getvalue())
    return digest


def lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def span(who: str, what: str, since: float, until: float, **more: Any) -> dict[str, Any]:
    """Seconds since the run began."""
    return {"who": who, "what": what, "since": BEGAN + since, "until": BEGAN + until, **more}


def make_run(
    run: Path,
    steps: int = 40,
    change: Callable[[int], dict[str, Any]] = lambda number: {},
    status: dict[str, Any] | None = None,
    accuracy: tuple[float, ...] = (0.4, 0.5, 0.6),
) -> Path:
    """A finished run; `change` says what is not healthy at a step."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(CONFIG)
    lines(run / "metrics.jsonl", [step(number, **change(number)) for number in range(1, steps + 1)])
    held_out = [
        {"step": steps * i // max(1, len(accuracy) - 1), "accuracy": value, "reward": value, "rows": 50, "errors": 0}
        for i, value in enumerate(accuracy)
    ]
    lines(run / "evaluations.jsonl", held_out)
    said = {"phase": "finished", "step": steps, "total_steps": steps, "time": BEGAN + steps * STEP_S, "errors": {}}
    (run / "status.json").write_text(json.dumps(said | (status or {})))
    start = {"time": BEGAN, "step": 0, "device": "cpu", "python": "3.11.7", "packages": {"torch": "2.13.0"}}
    (run / "environment.json").write_text(json.dumps({"starts": [start]}))
    server = [span("host-1", "usage", number * STEP_S - 10, number * STEP_S) for number in range(1, steps + 1)]
    work = [span("host-1", "generating", number * STEP_S - 9, number * STEP_S - 3) for number in range(1, steps + 1)]
    lines(run / "timeline.jsonl", [*server, *work, span("learner", "saving", steps * STEP_S, steps * STEP_S + 3)])
    shown = image(run)
    lines(
        run / "samples.jsonl",
        [
            sample(1, [shown], completion("two", 1.0), completion("two", 1.0)),
            sample(2, [shown], completion("nine", 0.0), completion("and so on", None, "error", "KeyError: 'x'")),
            sample(steps, [shown], completion("two " * 64, 0.5, "truncated"), completion("2", 1.0)),
        ],
    )
    return run
