"""Schedules that a run is too short for: allowed, and worth a word before hours are spent."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.schema import RunConfig


def schedule_notes(config: RunConfig, total_steps: int) -> Iterator[str]:
    """Yield a sentence with keys and values for each schedule that does not come to its end in so many learner
    steps."""
    algorithm, critic = config.algorithm, "critic" in config.algorithm.needs
    run = f"the run has {total_steps} steps"
    if critic and config.critic.warmup_steps >= total_steps:
        yield (
            f"critic.warmup_steps is {config.critic.warmup_steps} and {run}: the critic alone is trained, the policy "
            "never. Lower it, or raise trainer.max_steps"
        )
        return
    per_step, warmup = algorithm.updates_per_batch, config.critic.warmup_steps if critic else 0
    optimisers = [("learner.optim", config.learner.optim, (total_steps - warmup) * per_step)]
    optimisers += [("critic.optim", config.critic.optim, total_steps * per_step)] if critic else []
    for where, optim, updates in optimisers:
        if optim.lr_warmup_steps >= updates:
            highest = optim.lr * updates / optim.lr_warmup_steps
            yield (
                f"{where}.lr_warmup_steps is {optim.lr_warmup_steps} and the run makes {updates} of these optimiser "
                f"steps: the learning rate rises to the end, to {highest:.2g} of {optim.lr:g}. Lower it, or raise "
                "trainer.max_steps"
            )
    for method in algorithm.chosen_methods:
        yield from method.notes(config, total_steps)
