"""Heavy-tailed completion lengths against every staleness bound: is any token too old, what is lost, who waits?

    python -m benchmarks.staleness_simulation [--servers 1 4 16 64] [--bounds 0 1 2 4 8] [--sockets]

Runs the real ledger, journal and rollout-server logic with the scripted engine in virtual time (benchmarks/staleness),
checks every consumed token against the bound of its ticket, and prints a Markdown table. `--sockets` runs some cells in
real time over real sockets as well, next to their simulation. Exits with 1 if anything promised did not hold.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import get_args

from asyncrl.config.service_sections import OnStale
from benchmarks.staleness.observation import EMPTYING_STEPS, FILLING_STEPS, Observation
from benchmarks.staleness.simulation import simulate
from benchmarks.staleness.sockets import run_over_sockets
from benchmarks.staleness.workload import LARGEST_BOUND, Workload

MODES: tuple[OnStale, ...] = get_args(OnStale)
SMALL = Workload(
    servers=8,
    bound=0,
    steps=24,
    prompts_per_step=16,
    sequences=64,
    longest=128,
    seconds_per_token=0.008,
    learn_s=0.4,
    weights_s=(0.0, 0.02),
    latency_s=0.002,
)
"""Settings for real sockets: a step that takes less than half a second, so that it ends soon."""
SOCKET_CELLS: tuple[tuple[int, OnStale], ...] = (
    (0, "wait"),
    (1, "wait"),
    (4, "wait"),
    (1, "drop"),
    (4, "drop"),
    (1, "mask"),
)
COLUMNS = (
    "oldest",
    "mean age",
    "dropped",
    "masked",
    "length_bias",
    "trained length",
    "learner idle",
    "slots busy",
    "speed",
)


def cells(observation: Observation, base: Observation) -> list[str]:
    true_bias, error = observation.true_bias
    return [
        f"{observation.oldest}",
        f"{observation.mean_staleness:.2f}",
        f"{observation.dropped_share:.1%}",
        f"{observation.masked_share:.1%}",
        f"{observation.bias:+.1%}",
        f"{true_bias:+.1%} ± {error:.1%}",
        f"{observation.idle_ratio:.2f}",
        f"{observation.decoding_ratio:.2f}",
        f"{base.seconds_per_step / observation.seconds_per_step:.2f}",
    ]


def row(*texts: object) -> None:
    print("| " + " | ".join(str(text) for text in texts) + " |", flush=True)


def header(*names: str) -> None:
    row(*names)
    row(*["---"] * len(names))


def bound_name(workload: Workload) -> str:
    return "moving" if workload.bound is None else str(workload.bound)


def setting(workload: Workload) -> str:
    w = workload
    return (
        f"{w.steps} steps of {w.prompts_per_step} groups of {w.group_size}; lengths log-normal, median "
        f"{w.median_length:g}, sigma {w.length_sigma:g}, at most {w.longest}, mean {w.mean_length:.1f} tokens; "
        f"{w.seconds_per_token:g} s per token, {w.sequences} sequences at once over all servers (so the longest "
        f"completion takes {w.longest * w.seconds_per_token:.1f} s and a batch at full load "
        f"{w.prompts_per_step * w.group_size * w.mean_length * w.seconds_per_token / w.sequences:.2f} s); learner step "
        f"{w.learn_s:g} s; a version reaches a server after {w.weights_s[0]:g} to {w.weights_s[1]:g} s; weight_update "
        f"{w.weight_update}; idle and speed without the first {min(FILLING_STEPS, w.steps // 3)} and last "
        f"{min(EMPTYING_STEPS, w.steps // 6)} steps"
    )


def grid(servers: Sequence[int], bounds: Sequence[int], first: Workload) -> list[Observation]:
    print(f"Virtual time. {setting(first)}.\n")
    header("servers", "bound", "on_stale", *COLUMNS)
    seen: list[Observation] = []
    for number in servers:
        base = simulate(replace(first, servers=number, bound=0))
        wanted = [replace(first, servers=number, bound=b, on_stale=mode) for b in [*bounds, None] for mode in MODES]
        for workload in wanted:
            observation = simulate(workload)
            seen.append(observation)
            row(number, bound_name(workload), workload.on_stale, *cells(observation, base))
    return seen


def against_sockets(first: Workload) -> list[Observation]:
    print(f"\nReal time, real sockets, {first.servers} servers, next to virtual time. {setting(first)}.\n")
    header("bound", "on_stale", "clock", *COLUMNS)
    clocks: tuple[tuple[str, Callable[[Workload], Observation]], ...] = (
        ("virtual", simulate),
        ("real", run_over_sockets),
    )
    seen: list[Observation] = []
    bases = {clock: run(first) for clock, run in clocks}
    for bound, mode in SOCKET_CELLS:
        for clock, run in clocks:
            workload = replace(first, bound=bound, on_stale=mode)
            observation = bases[clock] if workload == first else run(workload)
            seen.append(observation)
            row(bound, mode, clock, *cells(observation, bases[clock]))
    return seen


def report_problems(observations: Iterable[Observation]) -> int:
    """How many there are."""
    found = [
        f"{o.workload.servers} servers, bound {bound_name(o.workload)}, {o.workload.on_stale}: {problem}"
        for o in observations
        for problem in o.problems
    ]
    tokens = sum(o.staleness.total() for o in observations)
    print(
        f"\n{tokens:,} consumed tokens checked against their tickets' bounds; {len(found)} violations of any promise."
    )
    for problem in found:
        print(f"- {problem}")
    return len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 4, LARGEST_BOUND])
    parser.add_argument("--weight-update", choices=["recompute", "keep", "drain"], default="recompute")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sockets", action="store_true", help="some cells over real sockets as well: two minutes")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    started, first = time.monotonic(), Workload(1, 0, weight_update=arguments.weight_update, seed=arguments.seed)
    seen = grid(arguments.servers, arguments.bounds, first)
    if arguments.sockets:
        seen += against_sockets(SMALL)
    problems = report_problems(seen)
    print(f"{time.monotonic() - started:.0f} s on one core.")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
