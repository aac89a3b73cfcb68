"""One learner step: groups -> advantages -> proximal log-probs -> packed micro-batches -> loss -> optimiser.

Decoupled PPO (arXiv 2505.24298): the clip is around the proximal policy, the learner's own at the start of the
step, and the correction weighs tokens by proximal over behaviour.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from asyncrl.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageEstimator
from asyncrl.algorithms.aggregation import token_weights
from asyncrl.algorithms.corrections import correction_weights
from asyncrl.algorithms.diagnostics import off_policy_diagnostics
from asyncrl.algorithms.losses import POLICY_LOSSES, LossFunction, PolicyTokens
from asyncrl.algorithms.plugins import resolve
from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError
from learner.batch import Batch
from learner.engines.base import TrainEngine
from learner.packing import MicroBatch, TrainGroup, build_micro_batch, plan_micro_batches


class LearnerStep:
    """The algorithm, bound to an engine. Calling it with a batch makes one step and returns its metrics."""

    def __init__(self, engine: TrainEngine, config: RunConfig):
        self.engine = engine
        self.config = config
        a = config.algorithm
        self.estimator: AdvantageEstimator = resolve(a.adv_estimator, ADVANTAGE_ESTIMATORS, "algorithm.adv_estimator")
        self.loss: LossFunction = resolve(a.policy_loss, POLICY_LOSSES, "algorithm.policy_loss")

    def __call__(self, batch: Batch) -> dict[str, float]:
        """One optimiser step per `updates_per_batch`. Raises BadStateError when loss or gradient is not finite."""
        advantages = self.estimator(batch.scores, batch.groups, self.config.algorithm).detach()
        updates = _split_evenly(batch.train_groups, self.config.algorithm.updates_per_batch)
        # With a single update the policy does not move between this forward pass and the next: the proximal
        # log-probs are then the detached ones of the training pass itself.
        proximal = self._proximal_logprobs(batch) if len(updates) > 1 else None
        seen: dict[str, list[torch.Tensor]] = defaultdict(list)
        metrics: dict[str, list[float]] = defaultdict(list)
        for groups in updates:
            loss = self._accumulate(groups, batch, advantages, proximal, seen)
            if not math.isfinite(loss):
                raise BadStateError(f"the loss is {loss}. Look at the last samples and at metrics.jsonl")
            for name, value in {"loss": loss, **self.engine.optimizer_step()}.items():
                metrics[name].append(value)
        return {name: float(np.mean(values)) for name, values in metrics.items()} | self._report(seen)

    def _accumulate(
        self,
        groups: Sequence[TrainGroup],
        batch: Batch,
        advantages: torch.Tensor,
        proximal: torch.Tensor | None,
        seen: dict[str, list[torch.Tensor]],
    ) -> float:
        """Gradients of one update over its micro-batches. Returns the loss."""
        algorithm = self.config.algorithm
        weight_of_token = self._token_weights(groups, batch)
        total = 0.0
        for micro_batch in self._micro_batches(groups):
            index = batch.flat_index(micro_batch.row, micro_batch.column)
            outputs = self.engine.forward(micro_batch, entropy_gradient=algorithm.entropy_coeff > 0)
            tokens = PolicyTokens(
                logprobs=outputs.logprobs,
                proximal_logprobs=outputs.logprobs.detach() if proximal is None else self._place(proximal[index]),
                behaviour_logprobs=self._place(batch.behaviour_logprobs[index]),
                advantages=self._place(advantages[micro_batch.row]),
                row=self._place(micro_batch.row),
            )
            policy = self.loss(tokens, algorithm)
            correction = correction_weights(tokens.proximal_logprobs, tokens.behaviour_logprobs, algorithm.correction)
            token_loss = correction * policy.token_loss - algorithm.entropy_coeff * outputs.entropies
            loss = (self._place(weight_of_token[index]) * token_loss).sum()
            self.engine.backward(loss)
            total += float(loss.detach())
            seen["proximal"].append(tokens.proximal_logprobs.cpu())
            seen["behaviour"].append(tokens.behaviour_logprobs.cpu())
            seen["entropy"].append(outputs.entropies.detach().cpu())
            for name, indicator in policy.indicators.items():
                seen[name].append(indicator.float().cpu())
        return total

    @torch.no_grad()
    def _proximal_logprobs(self, batch: Batch) -> torch.Tensor:
        """[M] log-probs of the learner's policy at the start of the step; 0 where nothing is trained."""
        proximal = torch.zeros_like(batch.behaviour_logprobs)
        for micro_batch in self._micro_batches(batch.train_groups):
            index = batch.flat_index(micro_batch.row, micro_batch.column)
            proximal[index] = self.engine.forward(micro_batch).logprobs.cpu()
        return proximal

    def _token_weights(self, groups: Sequence[TrainGroup], batch: Batch) -> torch.Tensor:
        """[M] weight of each trainable token of this update, from counts over the whole update."""
        rows = [np.full(int(c.loss_mask.sum()), c.row) for group in groups for c in group.completions]
        columns = [np.flatnonzero(c.loss_mask) for group in groups for c in group.completions]
        row = torch.from_numpy(np.concatenate(rows)) if rows else torch.zeros(0, dtype=torch.long)
        column = torch.from_numpy(np.concatenate(columns)) if columns else torch.zeros(0, dtype=torch.long)
        weights = torch.zeros_like(batch.behaviour_logprobs)
        weights[batch.flat_index(row, column)] = token_weights(
            row,
            self.config.algorithm.loss_agg_mode,
            max_response_length=self.config.data.max_response_length,
        )
        return weights

    def _micro_batches(self, groups: Sequence[TrainGroup]) -> Iterator[MicroBatch]:
        """One at a time: only one micro-batch's pixels are on the device."""
        for part in plan_micro_batches(groups, self.config.batch.tokens_per_microbatch):
            yield build_micro_batch(self.engine.unwrap_model(), part, self.engine.device)

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.engine.device)

    def _report(self, seen: dict[str, list[torch.Tensor]]) -> dict[str, float]:
        if not seen:
            return {}
        joined = {name: torch.cat(parts) for name, parts in seen.items()}
        proximal, behaviour = joined.pop("proximal"), joined.pop("behaviour")
        means = {name: float(values.mean()) for name, values in joined.items()}
        clip_fraction = sum(value for name, value in means.items() if name.startswith("clip_fraction"))
        cap = self.config.algorithm.correction.cap
        return means | {"clip_fraction": clip_fraction} | off_policy_diagnostics(proximal, behaviour, cap)


def _split_evenly(groups: Sequence[TrainGroup], parts: int) -> list[Sequence[TrainGroup]]:
    """Contiguous parts whose sizes differ by at most one; empty parts are left out."""
    bounds = [round(i * len(groups) / parts) for i in range(parts + 1)]
    return [groups[a:b] for a, b in pairwise(bounds) if b > a]
