"""A rollout engine."""

import logging

from rollout_server.engines.hf.engine import HFEngine

logger = logging.getLogger("rollout_server.acme")


class AcmeEngine(HFEngine):
    async def start(self):
        logger.warning("the engine of acme starts")
        await super().start()
