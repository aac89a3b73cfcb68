"""Cost of a report: seconds, megabytes and memory for a made-up run of 1,000 steps.

    python benchmarks/report_cost.py [--steps 1000] [--folder DIR]

The run directory is made of the files and sizes of a real one: metrics of every step, two recorded groups of eight
completions per step with photographs of 1024 x 768 pixels, two rollout servers, an evaluation every 50 steps.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

SAMPLES_PER_STEP, GROUP_SIZE, STEP_S = 2, 8, 90.0
SERVERS = ("gpu-node-1", "gpu-node-2")
BEGAN = 1_700_000_000.0
LIMIT_S, LIMIT_BYTES = 20.0, 20e6
IMAGES = 200
"""Rows come back after an epoch."""
CONFIG = """\
run_dir: runs/photos
model: {path: models/vlm-7b}
data: {train_files: [photos.parquet], max_response_length: 512}
batch: {prompts_per_step: 64, group_size: 8}
learner: {max_staleness: 4}
reward: {functions: [{function: exact_match}]}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="keep the run directory here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = arguments.folder or Path(temporary) / "run"
        make_run(run, arguments.steps)
        recorded = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "asyncrl", "report", str(run)], check=True)
        seconds = time.monotonic() - began
        page = (run / "report.html").stat().st_size
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print("| steps | run directory, MB | seconds | page, MB | peak memory, MB |\n|---|---|---|---|---|")
    print(f"| {arguments.steps:,} | {recorded / 1e6:,.0f} | {seconds:.1f} | {page / 1e6:.1f} | {peak / 1e6:,.0f} |")
    if seconds > LIMIT_S or page > LIMIT_BYTES:
        sys.exit(f"more than {LIMIT_S:.0f} s or {LIMIT_BYTES / 1e6:.0f} MB")


def make_run(run: Path, steps: int, seed: int = 1) -> None:
    """A run directory as a finished learner leaves it."""
    rng = random.Random(seed)
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG)
    (run / "status.json").write_text(
        json.dumps({"phase": "finished", "step": steps, "total_steps": steps, "time": BEGAN + steps * STEP_S})
    )
    digests = _images(run / "images", min(IMAGES, steps * SAMPLES_PER_STEP))
    with (run / "metrics.jsonl").open("w") as metrics, (run / "timeline.jsonl").open("w") as timeline:
        for step in range(1, steps + 1):
            metrics.write(json.dumps(_step(step, steps, rng)) + "\n")
            timeline.writelines(json.dumps(span) + "\n" for span in _spans(step, rng))
    with (run / "samples.jsonl").open("w") as samples:
        for step in range(1, steps + 1):
            for _ in range(SAMPLES_PER_STEP):
                samples.write(json.dumps(_sample(step, steps, rng.choice(digests), rng)) + "\n")
    with (run / "evaluations.jsonl").open("w") as evaluations:
        for step in range(0, steps + 1, 50):
            accuracy = 0.3 + 0.4 * _course(step, steps) + rng.gauss(0, 0.01)
            evaluations.write(json.dumps({"step": step, "accuracy": accuracy, "rows": 1000, "errors": 0}) + "\n")


def _course(step: int, steps: int) -> float:
    return 1 - math.exp(-3 * step / steps)


def _step(step: int, steps: int, rng: random.Random) -> dict[str, float]:
    at = _course(step, steps)
    wait_s, publish_s = 15 * rng.random(), 2 + rng.random()
    record = {
        "step": step,
        "version": step,
        "time": BEGAN + step * STEP_S,
        "rows/finished": 500 - (late := rng.randrange(12)),
        "rows/truncated": 8,
        "rows/timed_out": late,
        "rows/error": 4,
        "response_length/mean": 200 + 150 * at + rng.gauss(0, 8),
        "response_length/max": 512,
        "tokens": 150_000 + 50_000 * at,
        "staleness/mean": 1.5 + rng.random(),
        "staleness/max": 4,
        "staleness/bound": 4,
        "reward/mean": 0.3 + 0.5 * at + rng.gauss(0, 0.04),
        "reward/exact_match": 0.3 + 0.45 * at + rng.gauss(0, 0.04),
        "reward/format": 0.5 + 0.5 * at,
        "accuracy": 0.3 + 0.45 * at + rng.gauss(0, 0.04),
        "loss": rng.gauss(0, 0.05),
        "grad_norm": math.exp(rng.gauss(0, 0.4)),
        "lr": 1e-6,
        "entropy": 0.7 - 0.4 * at + rng.gauss(0, 0.01),
        "ess": 0.97 + rng.gauss(0, 0.005),
        "mismatch_kl_k3": 0.004 * math.exp(rng.gauss(0, 0.3)),
        "step_s": STEP_S - 2,
        "wait_s": wait_s,
        "learn_s": STEP_S - 2 - wait_s - publish_s,
        "publish_s": publish_s,
        "publish_bytes": 15e9,
        "idle/learner": wait_s / STEP_S,
        "idle/rollout": 0.1 * rng.random(),
        "tokens_per_s/learner": 1900 + rng.gauss(0, 80),
        "tokens_per_s/rollout": 2000 + rng.gauss(0, 80),
        "rss_gib": 31 + at,
    }
    parts = ("ratio/p01", "ratio/p50", "ratio/p99", "ratio_max", "ess", "mismatch_kl_k3", "logprob_diff_max", "tokens")
    return record | {f"staleness_{bucket}/{part}": rng.random() for bucket in range(4) for part in parts}


def _spans(step: int, rng: random.Random) -> list[dict[str, object]]:
    since = BEGAN + (step - 1) * STEP_S
    spans: list[dict[str, object]] = []
    for server in SERVERS:
        loaded = since + 3 * rng.random()
        spans.append({"who": server, "what": "loading", "since": since, "until": loaded, "version": step})
        at = loaded
        while at < since + STEP_S - 8:
            until = at + 8 * rng.random()
            spans += [
                {"who": server, "what": "generating", "since": at, "until": until},
                {"who": server, "what": "scoring", "since": until - 0.5, "until": until + 0.7},
            ]
            at = until + rng.random()
        spans.append({"who": server, "what": "usage", "since": since, "until": since + STEP_S, "engine": "vllm"})
    return spans


def _sample(step: int, steps: int, digest: str, rng: random.Random) -> dict[str, object]:
    completions = []
    for _ in range(GROUP_SIZE):
        tokens = [rng.randrange(150_000) for _ in range(rng.randint(150, 512))]
        right = rng.random() < 0.3 + 0.5 * _course(step, steps)
        status = rng.choices(("finished", "truncated", "error"), (97, 2, 1))[0]
        words = " ".join(
            rng.choices(("the", "sign", "reads", "<b>left</b>", "of", "two", "red", "cars"), k=len(tokens))
        )
        completions.append(
            {
                "text": words,
                "reward": None if status == "error" else float(right),
                "rewards": {"exact_match": float(right)},
                "status": status,
                "error": "ValueError: no number in the answer" if status == "error" else "",
                "finish_reason": "stop",
                "length": len(tokens),
                "token_ids": tokens,
            }
        )
    question = "What does the sign on the left say, and how many cars pass below it?"
    return {
        "step": step,
        "row_id": f"photos.parquet:{rng.randrange(10**6)}",
        "prompt": question,
        "answer": "STOP; 2",
        "images": [digest],
        "completions": completions,
    }


def _images(folder: Path, count: int) -> list[str]:
    """JPEG files of some 200 kB, as a camera leaves them."""
    folder.mkdir()
    rng, digests = np.random.default_rng(1), []
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 255, (24, 32, 3), np.uint8)).resize(
            (1024, 768), Image.Resampling.BICUBIC
        )
        noisy = np.asarray(coarse, np.int16) + rng.integers(-12, 12, (768, 1024, 3), np.int16)
        file = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
        digests.append(hashlib.sha256(file.getvalue()).hexdigest())
        (folder / f"{digests[-1]}.jpg").write_bytes(file.getvalue())
    return digests


if __name__ == "__main__":
    main()
