"""`make bench`: every benchmark on a small model made here, and their tables.

python benchmarks/run.py [--folder DIR]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
GRPO = "asyncrl/demo/grpo.yaml"


def run(*command: str) -> None:
    subprocess.run([sys.executable, *command], check=True, cwd=ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None, help="where data and model are made and kept")
    folder: Path = parser.parse_args().folder or Path(tempfile.mkdtemp(prefix="asyncrl-bench-"))
    data, model = folder / "data", folder / "model"
    if not (model / "config.json").is_file():
        run("-m", "asyncrl.demo.data", "--out", str(data), "--sft-rows", "64")
        run("-m", "asyncrl.demo.model", "--out", str(model))
    files = [f"data.train_files=[{data}/rl.parquet]", f"data.val_files=[{data}/eval.parquet]", f"model.path={model}"]
    print("\n## Log-probs of engine and learner\n", flush=True)
    run("benchmarks/logprob_parity.py", GRPO, *files)
    print("\n## Weight updates while sequences run\n", flush=True)
    for length in (12, 96):
        run(
            "benchmarks/weight_updates.py",
            GRPO,
            f"--median-length={length}",
            *files,
            "rollout.max_concurrent_sequences=64",
            "learner.optim.lr_warmup_steps=0",
        )
        print(flush=True)
    print("\n## Attention of packed groups\n", flush=True)
    run("-m", "benchmarks.packed_attention", "--layers", "1")
    run("-m", "benchmarks.packed_against_padded")
    print("\n## Memory of the loss by size of the vocabulary\n", flush=True)
    for vocabulary, tokens in ((32_768, 1024), (131_072, 512)):
        shape = ("--vocabulary", str(vocabulary), "--tokens", str(tokens), "--hidden", "64")
        run("-m", "benchmarks.output_head", *shape, "--rounds", "1")
        print(flush=True)
    print("\n## Kept features of images\n", flush=True)
    run("-m", "benchmarks.vision_reuse")
    print("\n## What a step spends beside the model\n", flush=True)
    run("-m", "benchmarks.framework_share")
    print("\n## Publication of weights\n", flush=True)
    run("benchmarks/weights_throughput.py")
    print("\n## Staleness under heavy-tailed lengths\n", flush=True)
    run("-m", "benchmarks.staleness_simulation", "--servers", "1", "64", "--sockets")
    print("\n## Groups: decoded, verified, journaled, acknowledged\n", flush=True)
    run("benchmarks/group_throughput.py")
    run("benchmarks/journal_cost.py")
    print("\n## Samples of a large journal, looked at\n", flush=True)
    run("benchmarks/inspect_journal.py", "--gib", "1")
    print("\n## A report of 1,000 steps\n", flush=True)
    run("benchmarks/report_cost.py")
    print("\n## Asynchronous against synchronous\n", flush=True)
    run("benchmarks/async_speedup.py", "--model", str(model), "--data", str(data))


if __name__ == "__main__":
    main()
