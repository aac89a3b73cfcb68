"""Credit by parts of a completion `read 3 7 2 answer 12`: the reading by the score, the answer by the digits read.

One advantage for all tokens of a completion blames the token of the answer for digits that were misread. Here the
tokens of the reading have GRPO's advantage of the whole score, and those of the answer the advantage of `own_result`
among the completions of the group that read: whether the answer follows from the digits that were read, right or wrong.
The task is the demo of three digits (docs/lab-log/learning.md, "Reading and reckoning"). `python
benchmarks/demo_seeds.py --seeds 3` makes its data and warm start in a checkout of commit c26787b, here OLD:

    asyncrl train FOLDER/seed-3/config.yaml run_dir=RUN trainer.seed=4 model.dtype=float32 \
        'reward.functions=[{function: OLD/examples/digits/reward.py:answer},
        {function: OLD/examples/digits/reward.py:reading, weight: 0.3},
        {function: benchmarks/credit_by_parts.py:own_result, weight: 0},
        {function: benchmarks/credit_by_parts.py:reading_tokens, weight: 0}]' \
        algorithm.adv_estimator=benchmarks/credit_by_parts.py:credit_by_parts
    python -m benchmarks.digit_errors --by kind --data EVAL FOLDER/seed-3/sft/export RUN/export
"""

from __future__ import annotations

import re

import torch

from asyncrl.algorithms.advantages import normalised
from asyncrl.algorithms.trajectories import Credit, Trajectories
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.rewards.sample import RewardSample

COMPLETION = re.compile(r"(?:read((?: \d)+) )?answer (\d{1,3})")
RESULTS = {"sum": sum, "largest": max, "smallest": min, "range": lambda digits: max(digits) - min(digits)}
"""Result of digits by the kind of question."""


def read_digits(sample: RewardSample) -> tuple[list[int], int] | None:
    """Digits and answer of a completion; None for one that does not read."""
    match = COMPLETION.fullmatch(sample.completion.strip())
    return ([int(digit) for digit in match[1].split()], int(match[2])) if match and match[1] else None


def own_result(sample: RewardSample) -> float:
    """1.0 if the answer is what the question asks of the digits that were read."""
    said = read_digits(sample)
    return float(said is not None and RESULTS[sample.columns["kind"]](said[0]) == said[1])


def reading_tokens(sample: RewardSample) -> float:
    """Number of tokens up to the last digit that was read; 0 where none was: a column for the estimator."""
    said = read_digits(sample)
    return 1.0 + len(said[0]) if said else 0.0


def credit_by_parts(t: Trajectories, config: AlgorithmConfig) -> Credit:
    read = t.components["reading_tokens"]
    reads = read > 0
    whole = normalised(t.scores, t.group, config)
    own = normalised(torch.where(reads, t.components["own_result"], torch.nan), t.group, config)
    of_answer = reads[t.row] & (t.place >= read[t.row])
    return Credit(torch.where(of_answer, own[t.row], whole[t.row]))
