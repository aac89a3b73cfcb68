"""Memory of a finished run's learner, and of its device, over the steps.

    python -m benchmarks.memory_over_steps RUN_DIR

Exit code 1 where the device's reserved memory still grows in the second half of the run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from asyncrl.telemetry.jsonl import read_lines

RESERVED = "device_gib/reserved"
LEAST_GROWTH = 0.05
"""GiB that count as growth."""


def main() -> None:
    lines = read_lines(Path(sys.argv[1]) / "metrics.jsonl")
    shown = sorted({0, len(lines) // 4, len(lines) // 2, 3 * len(lines) // 4, len(lines) - 1})
    print("| step | resident, GiB | reserved on the device, GiB | publication, s |\n|---|---|---|---|")
    for line in (lines[number] for number in shown):
        reserved = f"{line[RESERVED]:.3f}" if RESERVED in line else "no device"
        print(f"| {line['step']} | {line['rss_gib']:.3f} | {reserved} | {line['publish_s']:.3f} |")
    half, last = lines[len(lines) // 2], lines[-1]
    if last.get(RESERVED, 0.0) > half.get(RESERVED, 0.0) + LEAST_GROWTH:
        sys.exit("the device's memory grows")


if __name__ == "__main__":
    main()
