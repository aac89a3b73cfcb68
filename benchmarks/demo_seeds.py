"""The demo with several seeds and one setting: the table of docs/results.md.

python benchmarks/demo_seeds.py [--seeds 1 2 3]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

DEMO = Path(__file__).parent.parent / "examples" / "digits" / "demo.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--folder", type=Path, default=None, help="keep the runs here")
    arguments = parser.parse_args()
    root = arguments.folder or Path(tempfile.mkdtemp(prefix="asyncrl-demo-"))
    rows = []
    for seed in arguments.seeds:
        folder = root / f"seed-{seed}"
        subprocess.run([sys.executable, str(DEMO), "--seed", str(seed), "--folder", str(folder)], check=True)
        rows.append(json.loads((folder / "summary.json").read_text()))
    print(f"\n{len(os.sched_getaffinity(0))} cores, {rows[0]['held_out_rows']} held-out rows\n")
    print("| seed | held-out before | held-out after | gain | reward first 10 | reward last 10 | total s |")
    print("|---|---|---|---|---|---|---|")
    gains = [row["accuracy_after"] - row["accuracy_before"] for row in rows]
    for row, gain in zip(rows, gains, strict=True):
        print(
            f"| {row['seed']} | {row['accuracy_before']:.3f} | {row['accuracy_after']:.3f} | {gain:+.3f} "
            f"| {row['reward_first_10_steps']:.3f} | {row['reward_last_10_steps']:.3f} "
            f"| {sum(row['seconds'].values()):.0f} |"
        )
    spread = f" (standard deviation {stdev(gains):.3f})" if len(gains) > 1 else ""
    print(f"\nmean gain {mean(gains):+.3f}{spread}")


if __name__ == "__main__":
    main()
