"""What is always measured about off-policyness, whatever the correction."""

from __future__ import annotations

import torch

from asyncrl.algorithms.corrections import ratio


def off_policy_diagnostics(
    proximal_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, cap: float
) -> dict[str, float]:
    """[N], [N] -> named numbers over trainable tokens, from uncorrected ratios r = pi_proximal / pi_behaviour.

    ess: (sum r)^2 / (N sum r^2), 1 when nothing differs. mismatch_kl_k1 and _k3: estimates of
    KL(behaviour || proximal) from behaviour's samples, -log r and r - 1 - log r.
    """
    if proximal_logprobs.numel() == 0:
        return {}
    difference = (proximal_logprobs - behaviour_logprobs).double()
    r = ratio(proximal_logprobs, behaviour_logprobs).double()
    q = torch.quantile(r, torch.tensor([0.01, 0.5, 0.99], dtype=torch.float64, device=r.device)).tolist()
    return {
        "ratio/p01": q[0],
        "ratio/p50": q[1],
        "ratio/p99": q[2],
        "ratio_max": float(r.max()),
        "ess": float(r.sum() ** 2 / (r.numel() * (r**2).sum())),
        "mismatch_kl_k1": float(-difference.mean()),
        "mismatch_kl_k3": float((r - 1 - difference).mean()),
        "logprob_diff_max": float(difference.abs().max()),
        "tis_clip_fraction": float((r > cap).double().mean()),
    }
