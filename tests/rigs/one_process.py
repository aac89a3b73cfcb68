"""The configuration of a run of ranks, for one process."""

from __future__ import annotations

from asyncrl.config.schema import RunConfig


def in_one_process(config: RunConfig) -> RunConfig:
    """Run without ranks: a step is recomputed where the command is given."""
    learner = config.learner
    if not learner.is_divided:
        return config
    alone = {
        "engine": "torch",
        "num_processes": 1,
        "cpu_offload": False,
    }
    return config.model_copy(update={"learner": learner.model_copy(update=alone)})
