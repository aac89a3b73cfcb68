"""Fuzz both ends of the wire: `python -m tests.rigs.fuzz_wire --messages 100000 --seed 1`.

A real learner's network thread and a good server work while another process sends mutated messages to both of the
learner's endpoints; then a real server's link listens to a hostile learner. Prints counts as JSON. Exit code 1 names
the problems: a hang, a damaged account, memory that grows, or a good server that was harmed. A crash is a traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.rigs.curve_keys import make_keys
from tests.rigs.fuzz.hostile_learner import fuzz_server_side
from tests.rigs.fuzz.peers import good_server, hostile_servers
from tests.rigs.fuzz.rig import LearnerRig, memory_mib, small_config

RSS_SLACK_MIB = 48.0
"""Allocator noise; a leak of 1 kB per message would show as 100 MiB."""
WARM_UP_TAKEN = 200
SLOW_S = 5.0
"""Longest that a good server may wait for an answer."""


def fuzz_learner_side(messages: int, seed: int, folder: Path, *, curve: bool) -> dict[str, Any]:
    keys = str(folder / "keys") if curve else ""
    if curve:
        make_keys(Path(keys))
    config = small_config(keys_dir=keys)
    endpoints = (config.network.control_endpoint, config.network.weights_endpoint)
    started = time.monotonic()
    slowest_probe_s, flooded = 0.0, 0
    sent: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as processes:
        good = processes.submit(good_server, *endpoints, keys)  # forks both, while this process has no threads
        rig = LearnerRig(config, folder)
        rss_mib = [memory_mib()]
        rig.start()
        try:
            rig.take(WARM_UP_TAKEN)
            for part, share in enumerate((messages // 5, messages - messages // 5)):
                hostile = processes.submit(hostile_servers, *endpoints, share, seed + part, keys)
                while not hostile.done():
                    rig.turn()
                rss_mib.append(memory_mib())
                report = hostile.result()
                sent += report["sent"]
                answers += report["answers"]
                flooded += report["flooded"]
                slowest_probe_s = max(slowest_probe_s, report["probe_s"])
            rig.take(WARM_UP_TAKEN)  # all tickets go on, and nothing is broken
            rss_mib[-1] = memory_mib()
            problems = rig.problems()
        finally:
            rig.close()
    problems += rig.journal_problems()
    waits = good.result()
    if rss_mib[-1] - rss_mib[1] > RSS_SLACK_MIB:
        problems.append(f"resident memory grew by {rss_mib[-1] - rss_mib[1]:.0f} MiB after the first fifth")
    if waits["errors"]:
        problems.append(f"the good server heard {waits['errors'][:3]}")
    for kind in ("ack", "chunk", "pulse"):
        if waits[kind]["max_ms"] > 1000 * SLOW_S:
            problems.append(f"the good server waited {waits[kind]['max_ms']:.0f} ms for an answer ({kind})")
    return {
        "sent": sent,
        "sent by peers over their budget": flooded,
        "answers": answers,
        "slowest_probe_s": slowest_probe_s,
        "good": waits,
        "errors": rig.network.servers.errors,
        "dropped": rig.network.control.dropped + rig.network.weights.dropped,
        "taken": len(rig.taken),
        "rss_mib": rss_mib,
        "seconds": time.monotonic() - started,
        "problems": problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="to each side")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--curve", action="store_true", help="with keys: hostile peers hold one that is authorised")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # refusals would be most of the output
    with tempfile.TemporaryDirectory() as folder:
        learner = fuzz_learner_side(arguments.messages, arguments.seed, Path(folder), curve=arguments.curve)
    server = asyncio.run(fuzz_server_side(arguments.messages, arguments.seed))
    if server["rss_mib"][1] - server["rss_mib"][0] > RSS_SLACK_MIB:
        server["problems"].append(f"the server's memory grew, in MiB: {server['rss_mib']}")
    print(json.dumps({"learner's side": learner, "server's side": server}, indent=2))
    problems = learner["problems"] + server["problems"]
    print("Problems: " + ("none" if not problems else "\n- ".join(["", *problems])))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
