"""`python -m learner --config CONFIG [--resume] [key=value ...]`"""

from __future__ import annotations

import gc

from asyncrl.config.schema import RunConfig
from asyncrl.entry import Start, require_fixed_ports, run_service
from asyncrl.telemetry.failure import reserve


def main(config: RunConfig, start: Start) -> None:
    import torch

    from learner.service import Learner

    require_fixed_ports(config)
    if config.learner.cpu_threads:
        torch.set_num_threads(config.learner.cpu_threads)
    torch.manual_seed(config.trainer.seed)
    learner = Learner(config, resume=start.resume)
    reserve(config.run_path, "learner")  # a new run has its directory only now
    gc.freeze()  # what imports and the model have left is there to stay: no collection need look at it again
    learner.run()


if __name__ == "__main__":
    run_service("learner", main, leave=True)
