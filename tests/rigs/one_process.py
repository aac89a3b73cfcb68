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
    kept = {name: value for name, value in dict(learner).items() if name != learner.engine}  # not the engine's section
    return config.model_copy(update={"learner": type(learner).model_validate(kept | alone)})
