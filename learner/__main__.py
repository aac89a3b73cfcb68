"""`python -m learner --config CONFIG [--resume [--accept-changes]] [--unattended] [key=value ...]`"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from asyncrl.config.schema import RunConfig
from asyncrl.service_entry import StartMode, require_fixed_ports, run_service
from learner.ranks.rank_variables import rank_of_service, with_given_ranks

if TYPE_CHECKING:
    from learner.service import Learner


def main(config: RunConfig, start: StartMode) -> None:
    config = with_given_ranks(config)
    if rank_of_service() > 0:
        _follow(config)
        return
    learner = prepare(config, start)
    from learner.training_loop import train

    gc.freeze()  # objects of imports and model stay: no collection need look at them again
    train(learner)


def prepare(config: RunConfig, start: StartMode) -> Learner:
    """Create the learner. Raises UserError for everything that can be wrong with a configuration."""
    from asyncrl.devices.device import set_up_training
    from learner.service import Learner

    require_fixed_ports(config.network)
    set_up_training(config.learner, config.trainer)
    return Learner(config, resume=start.resume, unattended=start.unattended, accept_changes=start.accept_changes)


def _follow(config: RunConfig) -> None:
    """Run a rank other than 0."""
    from asyncrl.devices.device import set_up_training
    from learner.loop.follower import follow, trainer

    set_up_training(config.learner, config.trainer)
    follow(config, trainer)


if __name__ == "__main__":
    rank = rank_of_service()
    run_service(f"learner-rank{rank}" if rank else "learner", main)
