"""The method of a configuration in one line, for screens and reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.algorithm_settings import AlgorithmSettings

_NAMED = {"adv_estimator", "policy_loss", "selections", "filters", "updates_per_batch", "loss_agg_mode"}
_CLIP = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


def method_line(config: AlgorithmConfig) -> str:
    """Estimator, loss and correction, and each other key of the section that is not at its default:
    `grpo advantages, gspo loss (clip 0.0003/0.0004, seq-mean-token-mean), filters zero_variance, correction token_tis`.
    Clip and aggregation are also said where the method has its own and the run the usual ones.
    """
    changed = dict(_changed(config, AlgorithmSettings()))
    for name, section in (config.model_extra or {}).items():
        changed |= dict(_changed(section, type(section)(), f"{name}."))
    told = {*changed, *(key for method in config.chosen_methods for key in method.defaults)}
    of_loss = []
    if told & {*_CLIP}:
        dual = f"/{config.clip_ratio_c:g}" if "clip_ratio_c" in told else ""
        of_loss.append(f"clip {config.clip_ratio_low:g}/{config.clip_ratio_high:g}{dual}")
    of_loss += [config.loss_agg_mode] if "loss_agg_mode" in told else []
    updates = config.updates_per_batch
    correction = [config.correction.kind, *(f"{mask.kind} mask" for mask in config.correction.masks)]
    named = {*_NAMED, *_CLIP, "correction.kind", "correction.masks"}
    parts = [
        f"{config.adv_estimator} advantages",
        f"{config.policy_loss} loss" + (f" ({', '.join(of_loss)})" if of_loss else ""),
        *([f"selections {' + '.join(config.selections)}"] if config.selections else []),
        *([f"filters {' + '.join(config.filters)}"] if config.filters else []),
        f"correction {' + '.join(correction)}",
        *([f"{updates} updates"] if updates > 1 else []),
        *(f"{key} {_short(value)}" for key, value in changed.items() if key not in named),
    ]
    return ", ".join(parts)


def recorded_method_line(section: Any) -> str:
    """Method line of a run's config.yaml; empty where this version refuses its `algorithm` section."""
    try:
        return method_line(AlgorithmConfig.model_validate(section)) if isinstance(section, dict) else ""
    except (ValidationError, ValueError):
        return ""


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
