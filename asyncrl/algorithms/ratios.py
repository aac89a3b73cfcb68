"""Log-probs of tokens under the behaviour, proximal and target policies, and their importance ratios.

The proximal policy is what PPO's clip is around, and what the correction weighs samples towards. `recompute`, the
learner's policy at the start of the step, is exact and costs a forward pass where one batch makes several updates.
`loglinear` and `linear` place it between the behaviour and the target policy by the age of each token (AReaL, arXiv
2505.24298): free, and wrong by as much as the policy's path is not a straight line.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from asyncrl.algorithms.provenance import Provenance

LOG_RATIO_BOUND = 20.0
"""Every ratio's logarithm is clamped here, last before `exp` and nowhere else, so that no weight is infinite. A
trajectory's is clamped once its tokens are added up, or the bound would hide by how much one token outweighs the
others; a penalty on the logarithm itself is not clamped, or it would let go of a policy that has moved that far."""
SMALLEST_PROBABILITY = 1e-10


@dataclass(frozen=True)
class PolicyTokens:
    """Trained tokens of whole trajectories: what losses and corrections see of a micro-batch. All [N], fp32."""

    logprobs: torch.Tensor
    """Target policy, with gradient."""
    proximal_logprobs: torch.Tensor
    """Proximal policy, detached."""
    behaviour_logprobs: torch.Tensor
    """Behaviour policy, as the engine reported it."""
    advantages: torch.Tensor
    row: torch.Tensor
    """int64 trajectory of each token."""
    marked: torch.Tensor | None = None
    """bool: tokens of the selection that the loss names as its `marks` (`clip_cov`, `kl_cov`)."""
    provenance: Provenance[torch.Tensor] | None = None
    """Provenance of the tokens, where a method learns from inserted ones. None: the policy sampled all of them."""
    entropies: torch.Tensor | None = None
    """Target policy's, detached; nats."""
    scores: torch.Tensor | None = None
    """Score of each token's trajectory."""
    version: int = 0
    """Policy version that the step trains: its number of steps before, for schedules."""

    def of_tokens(self, kept: torch.Tensor) -> PolicyTokens:
        """Ratios of the given tokens alone. [N] bool"""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self,
            provenance=self.provenance and self.provenance.of_tokens(kept),
            **{name: c[kept] for name, c in columns.items() if isinstance(c, torch.Tensor)},
        )


def approximate_proximal(
    kind: str, logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, versions: torch.Tensor, version: int
) -> torch.Tensor:
    """[N] detached proximal log-probs from the target's, the behaviour's and each token's policy version.

    `loglinear`: behaviour + alpha (target - behaviour). `linear`: log((1 - alpha) p_behaviour + alpha p_target).
    `target`: the target's own. `behaviour`: the behaviour's own.

    The target is on its way to `version + 1` and the proximal policy is `version`, so that a token of version b has
    alpha = (version - b) / (version + 1 - b); 0 for tokens that are not older, or have no version (negative).
    """
    target = logprobs.detach()
    if kind == "target":
        return target
    if kind == "behaviour":
        return behaviour_logprobs
    age = (version - versions).clamp_min(0).double()
    alpha = torch.where(versions >= 0, age / (age + 1), 0.0).float()
    if kind == "loglinear":
        return behaviour_logprobs + alpha * (target - behaviour_logprobs)
    if kind == "linear":
        mixture = (1 - alpha) * behaviour_logprobs.exp() + alpha * target.exp()
        return (mixture + SMALLEST_PROBABILITY).log()
    raise ValueError(f"unknown algorithm.proximal {kind!r}")


def ratio(numerator_logprobs: torch.Tensor, denominator_logprobs: torch.Tensor) -> torch.Tensor:
    """exp(numerator - denominator), the log clamped to +-20. [N], [N] -> [N]"""
    return bound(numerator_logprobs - denominator_logprobs).exp()


def bound(log_ratios: torch.Tensor) -> torch.Tensor:
    """Log-ratios clamped to +-20."""
    return log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def sequence_ratio(differences: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Product of the token ratios of each token's trajectory, its log clamped to +-20. [N], [N] -> [N]

    `differences` of log-probs are those of the tokens, not clamped. Correct only where all sampled tokens of a
    trajectory are present: packing never splits one, and asyncrl/config/schema.py refuses settings that would.
    """
    total, _ = _row_sums(differences, row)
    return bound(total).exp().to(differences.dtype)


def geometric_ratio(differences: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Geometric mean of the token ratios of each token's trajectory, its log clamped to +-20. Same arguments."""
    return bound(row_mean(differences, row)).exp()


def row_mean(values: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Mean over each token's trajectory. [N], [N] -> [N]"""
    total, count = _row_sums(values, row)
    return (total / count).to(values.dtype)


def any_in_row(condition: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Whether the condition holds for any token of each token's trajectory. [N] bool, [N] -> [N] bool"""
    return _row_sums(condition.float(), row)[0] > 0


def _row_sums(values: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of each token's trajectory and its number of tokens, fp64 [N]."""
    counts = torch.bincount(row)  # rows are small numbers: nothing is sorted
    totals = torch.zeros(len(counts), dtype=torch.float64, device=values.device)
    return totals.index_add(0, row, values.double())[row], counts[row].double()
