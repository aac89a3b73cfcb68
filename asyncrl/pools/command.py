"""`asyncrl pool`: listen until asked to end."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import closing, suppress
from pathlib import Path

from asyncrl.errors import UserError
from asyncrl.pools.host import PoolHost
from asyncrl.pools.metric_table import METRICS
from asyncrl.telemetry.logs import configure_logging
from asyncrl.telemetry.metric_set import MetricSet
from protocol.curve import POOL_SECRET, KeyFileError, read_learner_keys
from protocol.endpoints import BindError, InsecureBindError, endpoint_of

logger = logging.getLogger(__name__)


def serve(
    host: str,
    port: int,
    keys_dir: Path | None,
    *,
    insecure: bool,
    processes: int,
    metrics: tuple[str, int] | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; `metrics` are host and port of a Prometheus endpoint. Raises UserError where it
    cannot listen."""
    if processes < 1:
        raise UserError(f"--processes is {processes}: at least one is needed")
    for name, number in (("--port", port), ("--metrics-port", metrics[1] if metrics else 0)):
        if not 0 <= number <= 65535:
            raise UserError(f"{name} is {number}, which is no port: 0 (a free one) to 65535")
    with closing(MetricSet(METRICS, "pool")) as shown:
        if metrics is not None:  # before the pool listens: with a port that is taken nothing has begun
            shown.serve(*metrics, ("--metrics-host", "--metrics-port"))
        asyncio.run(_serve(endpoint_of(host, port), keys_dir, insecure=insecure, processes=processes, metrics=shown))


async def _serve(endpoint: str, keys_dir: Path | None, *, insecure: bool, processes: int, metrics: MetricSet) -> None:
    try:
        keys = read_learner_keys(keys_dir, POOL_SECRET) if keys_dir else None
        pool = PoolHost(endpoint, keys, insecure=insecure, processes=processes, metrics=metrics)
    except InsecureBindError as error:
        raise UserError(
            f"{endpoint} is not this machine's loopback, and without keys whoever reaches it can run code here. Make "
            "keys with `asyncrl keys DIR --pool` and give --keys-dir DIR, or --insecure on a network that you trust"
        ) from error
    except (BindError, KeyFileError) as error:
        raise UserError(str(error)) from error
    configure_logging("pool")
    logger.info("listening at %s, for %d processes, %s", pool.endpoint, processes, "with keys" if keys else "no keys")
    task, loop = asyncio.create_task(pool.run()), asyncio.get_running_loop()
    asked_by: list[signal.Signals] = []

    def end(number: signal.Signals) -> None:
        asked_by.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    with suppress(asyncio.CancelledError):
        await task
    logger.info("ended")
    if signal.SIGINT in asked_by:
        raise KeyboardInterrupt
