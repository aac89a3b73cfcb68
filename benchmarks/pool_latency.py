"""Seconds per score: worker processes of this machine against those of an `asyncrl pool` on loopback.

    python -m benchmarks.pool_latency

Prints the median of each, in turns, for a sample of text and for one with an image of 200 kB.
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from asyncrl.config.run_sections import NetworkConfig
from asyncrl.config.sections import RewardConfig
from asyncrl.launch.ports import free_port
from asyncrl.rewards.pool import RewardPool
from asyncrl.rewards.sample import RewardSample

ROUNDS, SCORES = 5, 200
REWARD = "def reward(sample):\n    return float(len(sample.completion))\n"


async def measure(endpoint: str, reward: Path) -> None:
    functions = ({"function": f"{reward}:reward"},)
    pools = {
        name: RewardPool(
            RewardConfig.model_validate({"functions": functions, "workers": 1, "pool": pool}), NetworkConfig()
        )
        for name, pool in (("local", ()), ("pool", (endpoint,)))
    }
    samples = {"text": RewardSample("an answer"), "image of 200 kB": RewardSample("an answer", images=[bytes(200_000)])}
    for pool in pools.values():
        await pool.start()
    try:
        for what, sample in samples.items():
            seconds: dict[str, list[float]] = {name: [] for name in pools}
            for _ in range(ROUNDS):
                for name, pool in pools.items():
                    for _ in range(SCORES):
                        began = time.perf_counter()
                        assert (await pool.score(sample)).reward == 9.0
                        seconds[name].append(time.perf_counter() - began)
            local, remote = (1000 * statistics.median(seconds[name]) for name in pools)
            print(f"{what}: local {local:.2f} ms, pool {remote:.2f} ms per score (medians of {ROUNDS * SCORES})")
    finally:
        for pool in pools.values():
            await pool.close()


def main() -> None:
    port = free_port("127.0.0.1")
    service = subprocess.Popen(
        [sys.executable, "-m", "asyncrl", "pool", "--port", str(port)], stderr=subprocess.DEVNULL
    )
    try:
        print(f"{os.cpu_count()} cores, Python {platform.python_version()}")
        with tempfile.TemporaryDirectory() as folder:
            reward = Path(folder) / "reward.py"
            reward.write_text(REWARD)
            asyncio.run(measure(f"tcp://127.0.0.1:{port}", reward))
    finally:
        service.terminate()
        service.wait()


if __name__ == "__main__":
    main()
