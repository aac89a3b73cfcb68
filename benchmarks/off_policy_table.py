"""Held-out accuracy against staleness with and without off-policy correction, on the digit task at a reduced setting.

    python -m benchmarks.off_policy_table --folder FOLDER [--warm-starts FOLDER] [--jobs 2] [--print]

Every run starts from the demo's warm start, takes STEPS learner steps of UPDATES optimiser steps each at a learning
rate that is too high for stale samples, and reads held-out accuracy once, at the end. Runs that are in
FOLDER/runs.jsonl are skipped, so that the table can be continued (benchmarks/demo_runs.py). Prints Markdown.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.demo_runs import Run, make_table, read_run, table_parser

STEPS = 80
UPDATES = 4
LEARNING_RATE = 2e-4
STALENESS: tuple[int | str, ...] = (0, 1, 2, 4, 8)
MEASURED_FROM = STEPS // 4
"""The pipeline is full from here on; means over a run's steps begin here."""
MOST_SECONDS = 900
"""A run that takes longer is stopped and not recorded."""

ARMS: Mapping[str, tuple[str, ...]] = {
    "none": ("algorithm.proximal=recompute", "algorithm.correction.kind=none"),
    "token_tis": ("algorithm.proximal=target", "algorithm.correction.kind=token_tis"),
    "decoupled_tis": ("algorithm.proximal=recompute", "algorithm.correction.kind=token_tis"),
    "icepop": ("algorithm.proximal=recompute", "algorithm.correction.kind=icepop"),
    "ppo_behaviour": ("algorithm.proximal=behaviour", "algorithm.correction.kind=none"),
}
MEANING: Mapping[str, str] = {
    "none": "PPO around the learner's policy at the start of the step; stale samples are taken as fresh (weight 1)",
    "token_tis": "policy gradient without a clip, each token weighted by min(pi_target / pi_behaviour, 2)",
    "decoupled_tis": "decoupled PPO: clip as in `none`, each token weighted by min(pi_proximal / pi_behaviour, 2)",
    "icepop": "clip as in `none`, weight pi_proximal / pi_behaviour where it is within [0.5, 5], else 0",
    "ppo_behaviour": "plain PPO on the engine's log-probs: the clip is around the behaviour policy, no other weight",
}


MEANS = [
    "step_s",
    "idle/learner",
    "staleness/mean",
    "ess",
    "mismatch_kl_k3",
    "clip_fraction",
    "mask_fraction",
    "truncation_fraction",
]


def run_of(arm: str, staleness: int | str, seed: int) -> Run:
    words = (
        f"trainer.max_steps={STEPS}",
        "evaluation.before_training=false",
        "evaluation.every_steps=0",
        f"algorithm.updates_per_batch={UPDATES}",
        f"learner.optim.lr={LEARNING_RATE}",
        f"learner.max_staleness={staleness}",
        *ARMS[arm],
    )
    return Run((("arm", arm), ("staleness", staleness)), seed, words)


def read(run_dir: Path) -> dict[str, Any]:
    return read_run(run_dir, MEASURED_FROM, MEANS, ("staleness/max", "ratio_max"))


def print_table(measured: list[dict[str, Any]]) -> None:
    """One row per arm and bound; accuracy as mean ± standard deviation over the seeds."""
    print(
        f"\n{measured[0]['steps']} learner steps of {UPDATES} optimiser steps, learning rate {LEARNING_RATE:g}, "
        f"{measured[0]['rows']} held-out rows\n"
    )
    print("| arm | max_staleness | realised | held-out accuracy | ESS | mismatch KL | masked | s per step | run s |")
    print("|---|---|---|---|---|---|---|---|---|")
    seen = list(dict.fromkeys(str(line["staleness"]) for line in measured))
    bounds = sorted(seen, key=lambda bound: (not bound.isdigit(), int(bound) if bound.isdigit() else 0))
    for arm in ARMS:
        for bound in bounds:
            lines = [line for line in measured if line["arm"] == arm and str(line["staleness"]) == bound]
            if not lines:
                continue
            accuracy = [line["accuracy"] for line in lines]
            spread = f" ± {stdev(accuracy):.3f}" if len(lines) > 1 else ""
            cells = {
                key: mean(line[key] for line in lines) for key in lines[0] if key not in ("name", "arm", "staleness")
            }
            print(
                f"| {arm} | {bound} | {cells['staleness_mean']:.2f} | {mean(accuracy):.3f}{spread} ({len(lines)}) "
                f"| {cells['ess']:.3f} | {cells['mismatch_kl_k3']:.4f} | {cells['mask_fraction']:.3f} "
                f"| {cells['step_s']:.2f} | {cells['wall_s']:.0f} |"
            )
    print()
    for arm, meaning in MEANING.items():
        print(f"- `{arm}`: {meaning}")


def main() -> None:
    parser = table_parser(__doc__)
    parser.add_argument("--staleness", nargs="+", default=STALENESS, help="bounds")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS))
    arguments = parser.parse_intermixed_args()
    wanted = [run_of(arm, s, seed) for seed in arguments.seeds for arm in arguments.arms for s in arguments.staleness]
    make_table(arguments, wanted, read, print_table, MOST_SECONDS)


if __name__ == "__main__":
    main()
