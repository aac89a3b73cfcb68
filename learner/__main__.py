"""`python -m learner --config CONFIG [--resume] [--unattended] [key=value ...]`"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from asyncrl.config.schema import RunConfig
from asyncrl.service_entry import Start, require_fixed_ports, run_service

if TYPE_CHECKING:
    from learner.service import Learner


def main(config: RunConfig, start: Start) -> None:
    learner = prepare(config, start)
    gc.freeze()  # objects of imports and model stay: no collection need look at them again
    learner.run()


def prepare(config: RunConfig, start: Start) -> Learner:
    """Create the learner. Raises UserError for everything that can be wrong with a configuration."""
    import torch

    from learner.service import Learner

    require_fixed_ports(config)
    if config.learner.cpu_threads:
        torch.set_num_threads(config.learner.cpu_threads)
    torch.manual_seed(config.trainer.seed)
    return Learner(config, resume=start.resume, unattended=start.unattended)


if __name__ == "__main__":
    run_service("learner", main)
