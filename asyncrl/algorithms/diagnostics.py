"""Measures of off-policyness, taken at every step whatever the correction: over all tokens, and by their staleness."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from asyncrl.algorithms.ratios import LOG_RATIO_BOUND

STALENESS_BUCKETS = ("0", "1", "2", "3", "4", "5-8", "9+")
"""Names of the groups of token staleness; few, because each is a label of several gauges."""
_BUCKET_STARTS = np.array([1, 2, 3, 4, 5, 9])

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
"""Reported quantiles of the raw token ratios."""

FRACTIONS = ("clip_fraction", "mask_fraction", "truncation_fraction")
"""Shares of tokens that the loss or the correction touches, reported by staleness as well."""


def off_policy_report(
    learner_logprobs: np.ndarray,
    behaviour_logprobs: np.ndarray,
    staleness: np.ndarray,
    fractions: Mapping[str, np.ndarray],
) -> dict[str, float]:
    """Numbers over all trainable tokens under their names, and by staleness under `staleness_<bucket>/<name>`.

    All [N]. `fractions`: 0 or 1 for each token, by the names of FRACTIONS; their means are reported.
    """

    def measure(chosen: np.ndarray | slice) -> dict[str, float]:
        diagnostics = off_policy_diagnostics(learner_logprobs[chosen], behaviour_logprobs[chosen])
        return diagnostics | {name: float(values[chosen].mean()) for name, values in fractions.items()}

    if learner_logprobs.size == 0:
        return {}
    report = measure(slice(None))
    bucket = np.searchsorted(_BUCKET_STARTS, staleness, side="right")
    for number, name in enumerate(STALENESS_BUCKETS):
        in_bucket = bucket == number
        if in_bucket.any():
            measured = measure(in_bucket) | {"tokens": float(in_bucket.sum())}
            report |= {f"staleness_{name}/{key}": value for key, value in measured.items()}
    return report


def off_policy_diagnostics(learner_logprobs: np.ndarray, behaviour_logprobs: np.ndarray) -> dict[str, float]:
    """[N], [N] -> named numbers over trainable tokens, from uncorrected ratios r = pi_learner / pi_behaviour.

    ess: (sum r)^2 / (N sum r^2), 1 when nothing differs. mismatch_kl_k1 and _k3: estimates of
    KL(behaviour || learner) from behaviour's samples, -log r and r - 1 - log r.
    """
    if learner_logprobs.size == 0:
        return {}
    difference = learner_logprobs.astype(np.float64) - behaviour_logprobs.astype(np.float64)
    log_ratio = difference.clip(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    r = np.exp(log_ratio)
    quantiles = np.quantile(r, list(QUANTILES.values()))
    return {
        **{f"ratio/{name}": float(value) for name, value in zip(QUANTILES, quantiles, strict=True)},
        "ratio_max": float(r.max()),
        "ess": float(r.sum() ** 2 / (r.size * (r**2).sum())),
        "mismatch_kl_k1": float(-difference.mean()),
        "mismatch_kl_k3": float((r - 1 - log_ratio).mean()),
        "logprob_diff_max": float(np.abs(difference).max()),
    }


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant one. NaN where returns are
    equal or there are less than two."""
    if len(returns) < 2:
        return float("nan")
    variance = returns.double().var()
    return float(1 - (returns.double() - values.double()).var() / variance) if variance > 0 else float("nan")
