"""`python -m rollout_server --config CONFIG [--unattended] [key=value ...]`"""

from __future__ import annotations

import asyncio
import logging
import signal
from functools import partial
from pathlib import Path

from asyncrl.config.schema import RunConfig
from asyncrl.run_folder.lock import is_over
from asyncrl.service_entry import StartMode, require_fixed_ports, run_service
from rollout_server.link import OVER

logger = logging.getLogger(__name__)


def main(config: RunConfig, start: StartMode) -> None:
    import torch

    from asyncrl.devices.device import keep_freed_memory, resolve_device

    require_fixed_ports(config.network)
    if _is_over(config.run_path, start):
        logger.info(OVER)
        return
    if config.rollout.cpu_threads:
        torch.set_num_threads(config.rollout.cpu_threads)
    if config.trainer.mode == "async" and resolve_device(config.rollout.device, "rollout.device").type == "cpu":
        keep_freed_memory()
    asyncio.run(_serve_until_signalled(config, start))


def _is_over(run_path: Path, start: StartMode) -> bool:
    return start.unattended and is_over(run_path)


async def _serve_until_signalled(config: RunConfig, start: StartMode) -> None:
    from rollout_server.service import RolloutServer

    server = RolloutServer(config, partial(_is_over, config.run_path, start))
    task, loop = asyncio.create_task(server.run()), asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    async def drain() -> None:
        try:
            await server.drain()
        finally:
            task.cancel()

    def asked_to_end() -> None:
        if draining:  # for the second time
            task.cancel()
        else:
            draining.append(asyncio.create_task(drain()))

    loop.add_signal_handler(signal.SIGINT, task.cancel)
    loop.add_signal_handler(signal.SIGTERM, asked_to_end)
    try:
        await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


if __name__ == "__main__":
    run_service("rollout_server", main)
