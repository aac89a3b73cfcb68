"""Settings that are computed from several keys of another framework: `by: [function, their keys]` in a table.

A function takes the values of these keys, its own first and a key that is not given as None, and returns our settings,
or None where there are none of that meaning.
"""

from __future__ import annotations

from math import exp, sqrt
from typing import Any

Settings = dict[str, Any] | None

ESTIMATORS = {"low_var_kl": "k3", "mse": "k2", "kl": "k1", "kl+": "k1+", "low_var_kl+": "k3+"}
"""Names of KL estimators that are called otherwise here."""
WEIGHTS = {
    ("token", False): "token_tis",
    ("token", True): "icepop",
    ("sequence", False): "sequence_tis",
    ("sequence", True): "sequence_mis",
}
"""Kind of a correction, by its level and whether it keeps ratios within two bounds."""


def kl_estimators(of_loss: Any, in_reward: Any) -> Settings:
    """Estimators of a KL in the loss and of one in the reward; None where only the other one is there. Here one key
    serves both, and left out it is k3 in the loss and k1 in the reward."""
    loss, reward = (ESTIMATORS.get(name, name) for name in (of_loss, in_reward))
    if (loss or "k3", reward or "k1") == ("k3", "k1"):
        return {}
    if loss == "k1" or (loss and reward and loss != reward) or "full" in (loss, reward):
        return None
    return {"algorithm.kl_estimator": loss or reward}


def importance_weights(level: Any, threshold: Any) -> Settings:
    """Correction of verl: a number truncates, `lower_upper` keeps the ratios in between (IcePop)."""
    lower, between, upper = str(threshold).strip().rpartition("_")
    kind = WEIGHTS.get((level, bool(between)))
    try:
        bounds = {"upper": float(upper)} | ({"lower": float(lower)} if between else {})
    except ValueError:
        return None
    return (
        None
        if kind is None
        else {"algorithm.correction.kind": kind} | {f"algorithm.correction.{n}": b for n, b in bounds.items()}
    )


def rejections(criteria: Any, thresholds: Any) -> Settings:
    """Masks of verl's rejection of whole rows, whose bounds are those of the inverse ratio."""
    names = list(dict.fromkeys(_parts(criteria)))
    bounds = _parts("" if thresholds is None else thresholds)
    bounds = bounds * len(names) if len(bounds) == 1 else bounds
    if not names or len(bounds) != len(names):
        return None
    masks = [_mask(*each) for each in zip(names, bounds, strict=True)]
    kinds = {mask["kind"] for mask in masks if mask}
    return {"algorithm.correction.masks": masks} if len(kinds) == len(names) else None


def _parts(text: Any) -> list[str]:
    return [part.strip() for part in str(text).split(",") if part.strip()]


def _mask(criterion: str, bound: str) -> dict[str, Any] | None:
    """Bounds of the ratio r of a row's product, its mean or any token. With x = log r, a criterion keeps what has -x
    within the logarithms of two thresholds (k1), or x^2 / 2 (k2) or e^x - 1 - x (k3) under one."""
    kind = {"seq_sum_k1": "sequence", "seq_mean_k1": "geometric", "seq_max_k2": "veto", "seq_max_k3": "veto"}
    low, between, high = bound.rpartition("_")
    try:
        most = float(high)
        if criterion.endswith("k1"):
            lower, upper = 1 / most, 1 / float(low) if between else most
        elif criterion.endswith("k2"):
            lower, upper = exp(-sqrt(2 * most)), exp(sqrt(2 * most))
        else:
            lower, upper = (exp(_where_k3_is(most, end)) for end in (-1 - most, sqrt(2 * most)))
    except (ValueError, ZeroDivisionError):
        return None
    if criterion not in kind or not 0 < lower < 1 < upper:
        return None
    return {"kind": kind[criterion], "lower": lower, "upper": upper}


def _where_k3_is(most: float, beyond: float) -> float:
    """x between 0 and `beyond` at which e^x - 1 - x is `most`, which it grows to from 0."""
    within = 0.0
    for _ in range(60):
        middle = (within + beyond) / 2
        within, beyond = (middle, beyond) if exp(middle) - 1 - middle <= most else (within, middle)
    return within


def updates_per_batch(batch: Any, mini_batch: Any) -> Settings:
    """Optimiser steps of a batch of prompts that is cut into mini-batches."""
    updates = _ratio(batch, mini_batch)
    return None if updates is None else {"algorithm.updates_per_batch": updates}


def warmup(steps: Any, share: Any, total_steps: Any, batch: Any, mini_batch: Any) -> Settings:
    """Warm-up that counts learner steps, or a share of the run's where the number is not above 0. Here it counts
    optimiser steps."""
    updates = _ratio(batch, mini_batch)
    if not (steps and steps > 0):
        steps = int(share * total_steps) if share and total_steps and total_steps > 0 else 0 if not share else None
    if steps == 0:
        return {"learner.optim.lr_warmup_steps": 0}
    return {"learner.optim.lr_warmup_steps": steps * updates} if steps and updates else None


def _ratio(whole: Any, part: Any) -> int | None:
    """Return whole / part, a whole number above 0, or None."""
    return whole // part if whole and part and whole >= part and whole % part == 0 else None


def clip_of_cispo(upper: Any, epsilon: Any) -> Settings:
    """Bound of TRL's cispo, which is that of the ratio itself; from below there is none."""
    upper = epsilon if upper is None else upper
    return {"algorithm.clip_ratio_low": 1.0, "algorithm.clip_ratio_high": round(upper - 1, 9)} if upper > 1 else None


def clip_of_trl(upper: Any, epsilon: Any) -> Settings:
    """Clip range of TRL, where the lower bound serves both unless the upper one is given."""
    return {"algorithm.clip_ratio_low": epsilon, "algorithm.clip_ratio_high": epsilon if upper is None else upper}


def correction_of_trl(mode: Any, lower: Any, upper: Any, cap: Any) -> Settings:
    """Correction of TRL. `cap` is the old name of the upper bound. A mask without a bound keeps what is beyond."""
    upper = upper if cap is None else cap
    level, _, form = str(mode).partition("_")
    if level not in ("token", "sequence") or form not in ("truncate", "mask") or (form == "truncate" and lower):
        return None
    kind = f"{level}_{'tis' if form == 'truncate' else 'mis'}"
    settings = {"algorithm.correction.kind": kind, "algorithm.correction.upper": 1e9 if upper is None else upper}
    return settings | ({} if form == "truncate" else {"algorithm.correction.lower": lower or 0.0})


def steps_of_trl(micro_steps: Any, accumulated: Any) -> Settings:
    """Optimiser steps of a generation: `steps_per_generation` counts micro-steps, by default those of one."""
    return updates_per_batch(micro_steps or accumulated, accumulated)


def prompts(generation: Any, completions: Any) -> Settings:
    """Prompts of a generation: all its completions over those of a prompt."""
    number = _ratio(generation, completions)
    return None if number is None else {"batch.prompts_per_step": number}


def betas(first: Any, second: Any) -> Settings:
    """Betas of Adam that are keys of their own."""
    return {"learner.optim.betas": [first, second]}
