"""`python -m learner --config CONFIG [--resume] [key=value ...]`"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from asyncrl.config.schema import RunConfig
from asyncrl.entry import Start, require_fixed_ports, run_service
from asyncrl.errors import ResumeRefusedError, RunTakenError, UserError
from asyncrl.telemetry.failure import forget_failure, read_failure, reserve

if TYPE_CHECKING:
    from learner.service import Learner


def main(config: RunConfig, start: Start) -> None:
    earlier = read_failure(config.run_path)
    try:
        learner = prepare(config, start)
    except RunTakenError:
        raise
    except UserError as error:
        if start.resume:
            raise ResumeRefusedError(str(error)) from error
        raise
    forget_failure(config.run_path, earlier)  # a run that goes on has not failed
    reserve(config.run_path, "learner")  # a new run has its directory only now
    gc.freeze()  # what imports and the model have left is there to stay: no collection need look at it again
    learner.run()


def prepare(config: RunConfig, start: Start) -> Learner:
    """Raises UserError for everything that can be wrong with a configuration."""
    import torch

    from learner.service import Learner

    require_fixed_ports(config)
    if config.learner.cpu_threads:
        torch.set_num_threads(config.learner.cpu_threads)
    torch.manual_seed(config.trainer.seed)
    return Learner(config, resume=start.resume)


if __name__ == "__main__":
    run_service("learner", main, leave=True)
