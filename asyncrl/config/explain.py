"""A configuration explained: the text of `--dry-run`, the method in one line, and schedules that a run is too short
for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.installed_methods import chosen_hooks
from asyncrl.config.load import dump_config
from asyncrl.config.method import BY_SECTION
from asyncrl.config.schema import RunConfig


def explain(config: RunConfig, num_rows: int, *, whole: bool = False) -> str:
    """The resolved configuration without the keys at their defaults, or `whole`, its method in one line, schedules that
    the run is too short for, the three batch numbers and all that follows from them. Rows are those left after
    filtering."""
    batch, updates = config.batch, config.algorithm.updates_per_batch
    longest = config.data.max_prompt_length + config.data.max_response_length
    per_group = "group_size" if config.trajectories_per_group == batch.group_size else "(group_size + a greedy one)"
    tokens = config.trajectories_per_step * config.data.max_response_length
    total = config.total_steps(num_rows)
    epochs = total * batch.prompts_per_step / num_rows if num_rows else 0.0
    bound = "trainer.max_steps" if config.trainer.max_steps else "trainer.total_epochs, rounded up to whole steps"
    if not config.trainer.max_steps and (config.algorithm.filters or chosen_hooks("prompt_source", config.algorithm)):
        bound += "; at most: rows that are filtered or passed over take no place in a step"
    lines = [
        ("batch.prompts_per_step", batch.prompts_per_step, "groups that one learner step consumes"),
        ("batch.group_size", batch.group_size, "completions per prompt"),
        ("batch.tokens_per_microbatch", batch.tokens_per_microbatch, f"one sample has at most {longest}"),
        ("trajectories per step", config.trajectories_per_step, f"prompts_per_step * {per_group}"),
        ("optimiser steps per batch", updates, "algorithm.updates_per_batch"),
        ("groups per optimiser step", batch.prompts_per_step // updates, "prompts_per_step / updates_per_batch"),
        ("groups in flight, at most", config.groups_in_flight, "(largest staleness + 1) * prompts_per_step"),
        ("completion tokens per step, at most", tokens, "trajectories per step * data.max_response_length"),
        ("steps per epoch", f"{num_rows / batch.prompts_per_step:.4g}", f"{num_rows} training rows / prompts_per_step"),
        ("steps in all", total, f"{bound}; {epochs:.4g} epochs"),
        ("optimiser steps in all", total * updates, "steps in all * updates_per_batch"),
    ]
    width = max(len(name) for name, _, _ in lines)
    table = [f"{name:<{width}}  {value!s:>8}  {why}" for name, value, why in lines]
    notes = [f"note: {note}" for note in schedule_notes(config, total)]
    algorithm = ["# Algorithm", method_line(config.algorithm), *notes, ""]
    heading = "# Configuration" + (" (keys that differ from their defaults; --all prints every key)" * (not whole))
    return "\n".join([heading, dump_config(config, whole=whole), *algorithm, "# Batches", *table])


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


_NAMED = {"adv_estimator", "policy_loss", "selections", "filters", "updates_per_batch", "loss_agg_mode"}
_CLIP = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


def method_line(config: AlgorithmConfig) -> str:
    """Estimator, loss and correction, and each other key of the section that is not at its default:
    `grpo advantages, gspo loss (clip 0.0003/0.0004, seq-mean-token-mean), filters zero_variance, correction token_tis`.
    Clip and aggregation also stand there where the method has its own and the run the usual ones; hooks and other
    additions always do.
    """
    changed = dict(_changed(config, AlgorithmConfig()))
    for name, section in (config.model_extra or {}).items():
        changed |= dict(_changed(section, type(section)(), f"{name}."))
    told = {*changed, *(key for method in config.chosen_methods for key in method.defaults)}
    of_loss = []
    if told & {*_CLIP}:
        dual = f"/{config.clip_ratio_c:g}" if "clip_ratio_c" in told else ""
        of_loss.append(f"clip {config.clip_ratio_low:g}/{config.clip_ratio_high:g}{dual}")
    of_loss += [config.loss_agg_mode] if "loss_agg_mode" in told else []
    updates = config.updates_per_batch
    additions = dict.fromkeys(name for kind in BY_SECTION for name in chosen_hooks(kind, config))
    correction = [config.correction.kind, *(f"{mask.kind} mask" for mask in config.correction.masks)]
    named = {*_NAMED, *_CLIP, "correction.kind", "correction.masks"}
    parts = [
        f"{config.adv_estimator} advantages",
        f"{config.policy_loss} loss" + (f" ({', '.join(of_loss)})" if of_loss else ""),
        *([f"selections {' + '.join(config.selections)}"] if config.selections else []),
        *([f"filters {' + '.join(config.filters)}"] if config.filters else []),
        f"correction {' + '.join(correction)}",
        *([f"with {' + '.join(additions)}"] if additions else []),
        *([f"{updates} updates"] if updates > 1 else []),
        *(f"{key} {_short(value)}" for key, value in changed.items() if key not in named),
    ]
    return ", ".join(parts)


def _changed(config: BaseModel, default: BaseModel, above: str = "") -> Iterator[tuple[str, Any]]:
    """Keys below `config` with another value than in `default`, which has its fields."""
    for name in type(default).model_fields:
        value, usual = getattr(config, name), getattr(default, name)
        if isinstance(value, BaseModel):
            yield from _changed(value, usual, f"{above}{name}.")
        elif value != usual:
            yield f"{above}{name}", value


def _short(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
