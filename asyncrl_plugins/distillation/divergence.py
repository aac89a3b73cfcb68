"""Generalised Jensen-Shannon divergence of teacher and student, on the teacher's likeliest tokens and a class of all
others.

A divergence of the coarser distributions is at most that of the whole ones, and 0 only where they agree (data
processing inequality). Without the class of others the terms are no divergence: what the reverse KL is then lowered by
first is to take the student's mass off the teacher's tokens (verl, pull request 5041).
"""

from __future__ import annotations

import math

import torch


def likeliest(logprobs: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` likeliest tokens of each distribution: [n, V] log-probs -> [n, count] int64, the likeliest first."""
    return logprobs.topk(min(count, logprobs.shape[-1]), dim=-1).indices


def class_logprobs(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[n, V] log-probs, [n, k] ids -> [n, k + 1] log-probs of these tokens, and last of all others as one class.

    The others are added up: 1 minus the sum of few likely tokens would be nothing but its rounding. A class without
    mass has the log of the smallest number and no gradient.
    """
    smallest = torch.finfo(logprobs.dtype).tiny
    others = logprobs.scatter(-1, ids, float("-inf")).exp().sum(-1, keepdim=True)
    chosen = logprobs.gather(-1, ids).clamp_min(math.log(smallest))
    return torch.cat([chosen, others.clamp_min(smallest).log()], dim=-1)


def generalised_jsd(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """beta KL(teacher || m) + (1 - beta) KL(student || m) with m = beta teacher + (1 - beta) student (arXiv 2306.13649,
    equation 1). [n, C] log-probs of the same classes -> [n] in nats.

    At the ends it is what the divergence over beta, or over 1 - beta, goes to: 0 is the forward KL(teacher || student),
    which covers all that the teacher would say, and 1 the reverse KL(student || teacher), which keeps to what is
    likeliest. TRL takes the same values there.
    """
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """KL(first || second): [n, C], [n, C] -> [n]"""
    return (first.exp() * (first - second)).sum(-1)
