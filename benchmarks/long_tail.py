"""Long tails: how long does the learner wait, at equal capacities, by staleness bound, fleet and policy?

    python -m benchmarks.long_tail [--servers 1 4 16 64] [--bounds 0 1 2 4] [--sigmas 1 1.5] [--fleets 8] [--prompts 8]
        [--packed 4 16]

The real ledger, hand-out and rollout-server logic in virtual time (benchmarks/staleness). The servers together sample,
with all their places busy, just as many groups as the learner trains. The first table has servers of one speed; the
second, fleets of different ones, and what hand-out by measured speed, moves of stragglers and divided groups do for
them; the third, prompts that are long in each epoch, and what it helps to know them; the fourth, trajectories that are
packed onto few servers before each publication, where servers drain for new weights or take them up in flight. `of
ideal`: steps a second against a learner that never waits. Exits with 1 if anything promised did not hold.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any

from benchmarks.staleness.observation import Observation
from benchmarks.staleness.simulation import simulate
from benchmarks.staleness.workload import Workload
from benchmarks.staleness_simulation import header, report_problems, row

BASE = Workload(servers=1, bound=1, steps=32, prompts_per_step=32, sequences=64, longest=64, weights_s=(0.02, 0.05))
FLEETS: dict[str, dict[str, Any]] = {
    "half of them 3 times as fast": {"speeds": (0.5, 1.5)},
    "one in four at a fifth": {"speeds": (0.25, 1.25, 1.25, 1.25)},
    "one in four falls to a fifth": {"slows_to": 0.2},
    "of one speed, 6 places": {"sequences": 48, "prompts_per_step": 24},
}
POLICIES: dict[str, dict[str, bool]] = {
    "even": {"by_speed": False},
    "by speed": {},
    "stragglers move": {"moves": True},
    "groups are divided": {"divides": True},
    "both": {"moves": True, "divides": True},
}
ORDERS: dict[str, dict[str, Any]] = {
    "as issued": {"longest_first": False},
    "long prompts first": {},
    "long prompts in one step of four": {"longest_first": False, "tail_steps": 4},
}
PACKED: dict[str, dict[str, Any]] = {
    "drain": {"weight_update": "drain"},
    "drain, packed": {"weight_update": "drain", "packs": True},
    "in flight": {},
    "in flight, packed": {"packs": True},
}
SEEDS = (1, 2, 3)
COLUMNS = ("oldest", "dropped", "length bias", "learner idle", "places busy", "steps/s against bound 0", "of ideal")


def at_equal_capacity(workload: Workload) -> Workload:
    """With a time per token at which all places together sample a step's groups while the learner trains one."""
    tokens = workload.prompts_per_step * workload.group_size * workload.mean_length
    return replace(workload, seconds_per_token=workload.learn_s * workload.sequences / tokens)


def cells(seen: Observation, base: Observation) -> list[str]:
    bias, error = seen.true_bias
    return [
        f"{seen.oldest}",
        f"{seen.dropped}",
        f"{bias:+.1%} ± {error:.1%}",
        f"{seen.idle_ratio:.2f}",
        f"{seen.decoding_ratio:.2f}",
        f"{base.seconds_per_step / seen.seconds_per_step:.2f}",
        f"{seen.workload.learn_s / seen.seconds_per_step:.2f}",
    ]


def setting(w: Workload) -> str:
    return (
        f"{w.steps} steps of {w.prompts_per_step} groups of {w.group_size}; median {w.median_length:g} tokens, at most "
        f"{w.longest}; {w.sequences} places over all servers (with 64 servers four times as many, and groups); learner "
        f"step {w.learn_s:g} s"
    )


def one_speed(sigmas: Sequence[float], servers: Sequence[int], bounds: Sequence[int]) -> list[Observation]:
    print(f"Servers of one speed. {setting(BASE)}.\n")
    header("sigma", "longest / step", "servers", "bound", *COLUMNS)
    seen: list[Observation] = []
    for sigma in sigmas:
        for number in servers:
            # A server has places for a whole group; the batch grows with the places.
            places = max(BASE.sequences, number * BASE.group_size)
            sizes = {"sequences": places, "prompts_per_step": BASE.prompts_per_step * places // BASE.sequences}
            workload = at_equal_capacity(replace(BASE, servers=number, length_sigma=sigma, **sizes))
            base = simulate(replace(workload, bound=0))
            for bound in bounds:
                observation = base if bound == 0 else simulate(replace(workload, bound=bound))
                seen.append(observation)
                longest = workload.longest * workload.seconds_per_token / workload.learn_s
                row(f"{sigma:g}", f"{longest:.1f}", number, bound, *cells(observation, base))
    return seen


def mixed_speeds(number: int, bounds: Sequence[int]) -> list[Observation]:
    print(f"\n{number} servers of different speeds, sigma 1: steps/s of the ideal, by policy.\n")
    header("fleet", "bound", *POLICIES)
    seen: list[Observation] = []
    for name, fleet in FLEETS.items():
        workload = at_equal_capacity(replace(BASE, servers=number, **fleet))
        for bound in bounds:
            found = [simulate(replace(workload, bound=bound, **changes)) for changes in POLICIES.values()]
            row(name, bound, *(f"{o.workload.learn_s / o.seconds_per_step:.2f}" for o in found))
            seen += found
    return seen


def long_prompts(number: int, bounds: Sequence[int]) -> list[Observation]:
    print(
        f"\n{number} servers; 0.6 of the log-lengths' variance are the prompt's; 3 epochs of 16 steps, speed and idle "
        f"of the last two; median and range of {len(SEEDS)} seeds.\n"
    )
    header("sigma", "bound", "tickets", "learner idle", "steps/s against as issued", "range")
    seen: list[Observation] = []
    for sigma, bound in product((1.0, 1.5), bounds):
        base: dict[int, Observation] = {}
        for name, changes in ORDERS.items():
            found: list[Observation] = []
            for seed in SEEDS:
                prompts = {"of_prompt": 0.6, "steps": 48, "epochs": 3, "seed": seed}
                workload = at_equal_capacity(replace(BASE, servers=number, length_sigma=sigma, **prompts))
                observation = simulate(replace(workload, bound=bound, **changes))
                base.setdefault(seed, observation)
                found.append(observation)
            ratios = sorted(base[o.workload.seed].seconds_per_step / o.seconds_per_step for o in found)
            idle = median(o.idle_ratio for o in found)
            spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            row(f"{sigma:g}", bound, name, f"{idle:.2f}", f"{median(ratios):.2f}", spread)
            seen += found
    return seen


def packed(sigmas: Sequence[float], servers: Sequence[int], bounds: Sequence[int]) -> list[Observation]:
    print(
        "\nRunning trajectories packed onto few servers before each publication, by one who sees which are unfinished: "
        f"steps/s against drain alone, median and range of {len(SEEDS)} seeds.\n"
    )
    header("sigma", "servers", "bound", *PACKED)
    seen: list[Observation] = []
    for sigma, number, bound in product(sigmas, servers, bounds):
        workload = at_equal_capacity(replace(BASE, servers=number, length_sigma=sigma))
        found = {
            name: [simulate(replace(workload, bound=bound, seed=seed, **changes)) for seed in SEEDS]
            for name, changes in PACKED.items()
        }
        texts = []
        for observations in found.values():
            pairs = zip(found["drain"], observations, strict=True)
            ratios = sorted(base.seconds_per_step / o.seconds_per_step for base, o in pairs)
            texts.append(f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
            seen += observations
        row(f"{sigma:g}", number, bound, *texts)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--sigmas", type=float, nargs="+", default=[1.0, 1.5])
    parser.add_argument("--fleets", type=int, default=8, help="servers of the fleets of different speeds; 0: none")
    parser.add_argument("--prompts", type=int, default=8, help="servers for prompts of known lengths; 0: none")
    parser.add_argument("--packed", type=int, nargs="*", default=[4, 16], help="servers of packed trajectories")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    started = time.monotonic()
    seen = one_speed(arguments.sigmas, arguments.servers, arguments.bounds) if arguments.servers else []
    if arguments.fleets:
        seen += mixed_speeds(arguments.fleets, arguments.bounds)
    if arguments.prompts:
        seen += long_prompts(arguments.prompts, arguments.bounds)
    if arguments.packed:
        seen += packed(arguments.sigmas, arguments.packed, arguments.bounds)
    problems = report_problems(seen)
    print(f"{time.monotonic() - started:.0f} s on one core.")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
