"""One learner step: groups -> advantages -> proximal log-probs -> packed micro-batches -> loss -> optimiser.

Decoupled PPO (arXiv 2505.24298): the clip is around the proximal policy, by default the learner's own at the start of
the step, and the correction weighs tokens by proximal over behaviour.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from asyncrl.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageEstimator
from asyncrl.algorithms.aggregation import token_weights
from asyncrl.algorithms.corrections import Correction, correct
from asyncrl.algorithms.diagnostics import FRACTIONS, off_policy_report
from asyncrl.algorithms.losses import POLICY_LOSSES, LossFunction, PolicyLoss
from asyncrl.algorithms.masks import m2po_outliers
from asyncrl.algorithms.plugins import resolve
from asyncrl.algorithms.proximal import approximate
from asyncrl.algorithms.reference_kl import reference_kl
from asyncrl.algorithms.tokens import PolicyTokens
from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError
from asyncrl.journal.sample_index import TrainedBatch
from learner.training.batch import Batch
from learner.training.engines.base import TokenOutputs, TrainEngine
from learner.training.non_finite import NotFiniteError, name_parameters, name_rows, not_finite_tokens
from learner.training.packing import MicroBatch, TrainGroup, build_micro_batch, plan_micro_batches


@dataclass(frozen=True)
class _Prepared:
    """A batch and what is known about it before the first update. `M` are the batch's flat columns."""

    batch: Batch
    version: int
    advantages: torch.Tensor
    """[B]"""
    proximal: torch.Tensor | None
    """[M] of the policy at the start of the step, where a forward pass has computed them."""
    outliers: torch.Tensor | None
    """[M] bool, what the m2po mask drops."""


@dataclass(frozen=True)
class _MicroLoss:
    """What one micro-batch of N tokens adds to an update."""

    loss: torch.Tensor
    index: torch.Tensor
    """[N] places of its tokens in the batch's flat columns."""
    tokens: PolicyTokens
    outputs: TokenOutputs
    policy: PolicyLoss
    correction: Correction
    reference_kl: torch.Tensor | None
    """[N], where algorithm.kl_loss_coef asks for it."""


class LearnerStep:
    """The algorithm, bound to an engine. Calling it with a batch makes one step and returns its metrics."""

    trained: TrainedBatch
    """Each row and token of the last batch: what its metrics summarise."""

    def __init__(self, engine: TrainEngine, config: RunConfig):
        self.engine = engine
        self.config = config
        a = config.algorithm
        self.estimator: AdvantageEstimator = resolve(a.adv_estimator, ADVANTAGE_ESTIMATORS, "algorithm.adv_estimator")
        self.loss: LossFunction = resolve(a.policy_loss, POLICY_LOSSES, "algorithm.policy_loss")

    def __call__(self, batch: Batch, version: int) -> dict[str, float]:
        """One optimiser step per `updates_per_batch`; `version` is the policy's as it takes the batch.

        Raises NotFiniteError when a loss or a gradient is not finite; the weights are then those before that update.
        """
        updates = _split_evenly(batch.train_groups, self.config.algorithm.updates_per_batch)
        prepared = self._prepare(batch, version, len(updates))
        seen: dict[str, list[torch.Tensor]] = defaultdict(list)
        metrics: dict[str, list[float]] = defaultdict(list)
        for number, groups in enumerate(updates, 1):
            where = f"step {version + 1} (policy version {version}), update {number} of {len(updates)}"
            loss = self._accumulate(groups, prepared, seen, where)
            try:
                taken = self.engine.optimizer_step()
            except BadStateError as error:
                raise NotFiniteError("grad_norm", f"{where}: {error}. {self._blame(groups, prepared)}") from error
            for name, value in {"loss": loss, **taken}.items():
                metrics[name].append(value)
        joined = {name: torch.cat(parts).numpy() for name, parts in seen.items()}
        self.trained = _trained(joined, prepared)
        return {name: float(np.mean(values)) for name, values in metrics.items()} | _report(joined)

    def _prepare(self, batch: Batch, version: int, num_updates: int) -> _Prepared:
        algorithm = self.config.algorithm
        m2po = algorithm.correction.mask("m2po")
        # With a single update the policy does not move between this forward pass and the next: the proximal
        # log-probs are then the detached ones of the training pass itself, unless the whole batch needs them.
        needed = algorithm.proximal == "recompute" and (num_updates > 1 or m2po is not None)
        proximal = self._proximal_logprobs(batch) if needed else None
        outliers = None
        if m2po is not None and proximal is not None:
            trained = self._trained_index(batch.train_groups, batch)[1]
            outliers = torch.zeros(len(proximal), dtype=torch.bool)
            outliers[trained] = m2po_outliers(
                proximal[trained], batch.behaviour_logprobs[trained], m2po.effective_threshold
            )
        return _Prepared(
            batch=batch,
            version=version,
            advantages=self.estimator(batch.scores, batch.groups, algorithm).detach(),
            proximal=proximal,
            outliers=outliers,
        )

    def _accumulate(
        self, groups: Sequence[TrainGroup], prepared: _Prepared, seen: dict[str, list[torch.Tensor]], where: str
    ) -> float:
        """Gradients of one update over its micro-batches. Returns the loss."""
        total = 0.0
        for number, (micro_batch, part) in enumerate(self._losses(groups, prepared), 1):
            loss = float(part.loss.detach())
            if not math.isfinite(loss):
                raise NotFiniteError(
                    "loss",
                    f"{where}, micro-batch {number}: the loss is {loss}: {_culprit(part, prepared.batch)}. "
                    "The weights are those before this update. Look at these rows in the samples, and at the last "
                    "grad_norm and logprob_diff_max in metrics.jsonl",
                )
            self.engine.backward(part.loss)
            total += loss
            _remember(part, prepared, micro_batch, seen)
        return total

    def _losses(self, groups: Sequence[TrainGroup], prepared: _Prepared) -> Iterator[tuple[MicroBatch, _MicroLoss]]:
        """The loss of each micro-batch of an update, already divided by the update's denominators."""
        weight_of_token = self._token_weights(groups, prepared.batch)
        for micro_batch in self._micro_batches(groups):
            yield micro_batch, self._loss(micro_batch, prepared, weight_of_token)

    def _loss(self, micro_batch: MicroBatch, prepared: _Prepared, weight_of_token: torch.Tensor) -> _MicroLoss:
        algorithm, batch = self.config.algorithm, prepared.batch
        index = batch.flat_index(micro_batch.row, micro_batch.column)
        reference = self._reference_logprobs(micro_batch)
        outputs = self.engine.forward(micro_batch, entropy_gradient=algorithm.entropy_coeff > 0)
        behaviour = self._place(batch.behaviour_logprobs[index])
        tokens = PolicyTokens(
            logprobs=outputs.logprobs,
            proximal_logprobs=self._proximal(outputs.logprobs, behaviour, index, prepared),
            behaviour_logprobs=behaviour,
            advantages=self._place(prepared.advantages[micro_batch.row]),
            row=self._place(micro_batch.row),
        )
        policy = self.loss(tokens, algorithm)
        outliers = None if prepared.outliers is None else self._place(prepared.outliers[index])
        correction = correct(tokens, algorithm.correction, outliers)
        # `where`, because 0 * inf is not 0: nothing of a masked token may reach the sum or the gradient.
        policy_loss = torch.where(correction.masked, 0.0, correction.weights * policy.token_loss)
        token_loss = policy_loss - algorithm.entropy_coeff * outputs.entropies
        kl = None if reference is None else reference_kl(outputs.logprobs, reference)
        if kl is not None:
            token_loss = token_loss + algorithm.kl_loss_coef * kl
        loss = (self._place(weight_of_token[index]) * token_loss).sum()
        return _MicroLoss(loss, index, tokens, outputs, policy, correction, kl)

    def _reference_logprobs(self, micro_batch: MicroBatch) -> torch.Tensor | None:
        """[N], where the loss has a term of them."""
        if not self.config.algorithm.kl_loss_coef:
            return None
        with self.engine.reference():
            return self.engine.forward(micro_batch).logprobs

    def _proximal(
        self, logprobs: torch.Tensor, behaviour: torch.Tensor, index: torch.Tensor, prepared: _Prepared
    ) -> torch.Tensor:
        """[N] detached proximal log-probs of a micro-batch."""
        if prepared.proximal is not None:
            return self._place(prepared.proximal[index])
        kind = self.config.algorithm.proximal
        if kind == "recompute":  # a single update: the policy has not moved since the step began
            return logprobs.detach()
        versions = self._place(torch.from_numpy(prepared.batch.versions)[index])
        return approximate(kind, logprobs, behaviour, versions, prepared.version)

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
        row, index = self._trained_index(groups, batch)
        weights = torch.zeros_like(batch.behaviour_logprobs)
        weights[index] = token_weights(
            row,
            self.config.algorithm.loss_agg_mode,
            max_response_length=self.config.data.max_response_length,
        )
        return weights

    def _trained_index(self, groups: Sequence[TrainGroup], batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """[N], [N]: row, and place in the flat columns, of each trainable token of the groups."""
        rows = [np.full(int(c.loss_mask.sum()), c.row) for group in groups for c in group.completions]
        columns = [np.flatnonzero(c.loss_mask) for group in groups for c in group.completions]
        row = torch.from_numpy(np.concatenate(rows)) if rows else torch.zeros(0, dtype=torch.long)
        column = torch.from_numpy(np.concatenate(columns)) if columns else torch.zeros(0, dtype=torch.long)
        return row, batch.flat_index(row, column)

    def _micro_batches(self, groups: Sequence[TrainGroup]) -> Iterator[MicroBatch]:
        """One at a time: only one micro-batch's pixels are on the device."""
        for part in plan_micro_batches(groups, self.config.batch.tokens_per_microbatch):
            yield build_micro_batch(self.engine.unwrap_model(), part, self.engine.device)

    def _blame(self, groups: Sequence[TrainGroup], prepared: _Prepared) -> str:
        """Which micro-batch makes a gradient that is not finite. Backward passes of one update, once in a run."""
        for number, (micro_batch, part) in enumerate(self._losses(groups, prepared), 1):
            self.engine.clear_gradients()
            self.engine.backward(part.loss)
            bad = self.engine.not_finite_gradients()
            if bad:
                rows = name_rows(micro_batch.row.unique().tolist(), prepared.batch)
                return f"It comes from micro-batch {number} ({rows}) and shows in {name_parameters(bad)}"
        return "Each micro-batch alone has a finite gradient: their sum overflows"

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.engine.device)


def _culprit(part: _MicroLoss, batch: Batch) -> str:
    values = {
        "the learner's log-prob": part.outputs.logprobs,
        "the entropy": part.outputs.entropies,
        "the engine's log-prob": part.tokens.behaviour_logprobs,
        "the proximal log-prob": part.tokens.proximal_logprobs,
        "the advantage": part.tokens.advantages,
        "the correction weight": part.correction.weights,
        "the policy loss": part.policy.token_loss,
    }
    if part.reference_kl is not None:
        values["the KL to the reference"] = part.reference_kl
    return not_finite_tokens(values, part.tokens.row, batch)


def _remember(
    part: _MicroLoss, prepared: _Prepared, micro_batch: MicroBatch, seen: dict[str, list[torch.Tensor]]
) -> None:
    """Keep what the report needs of each token, on the CPU.

    The learner's side of the ratios is its policy at the start of the step, where a forward pass has computed it, and
    else that of the training pass, which has moved with the earlier updates of this batch.
    """
    learner = part.outputs.logprobs.detach() if prepared.proximal is None else part.tokens.proximal_logprobs
    values: dict[str, torch.Tensor] = {
        "index": part.index,
        "learner": learner,
        "behaviour": part.tokens.behaviour_logprobs,
        "staleness": prepared.version - torch.from_numpy(prepared.batch.versions)[part.index],
        "entropy": part.outputs.entropies.detach(),
        "mask_fraction": part.correction.masked.float(),
        "truncation_fraction": part.correction.truncated.float(),
        **{f"mask_fraction_{kind}": dropped.float() for kind, dropped in part.correction.masked_by.items()},
        **{name: indicator.float() for name, indicator in part.policy.indicators.items()},
    }
    if part.reference_kl is not None:
        values["reference_kl"] = part.reference_kl.detach()
    for name, value in values.items():
        seen[name].append(value.cpu())


def _trained(joined: Mapping[str, np.ndarray], prepared: _Prepared) -> TrainedBatch:
    """The remembered tokens in the batch's flat columns."""
    tokens = len(prepared.batch.behaviour_logprobs)
    logprobs, masked = np.full(tokens, np.nan, np.float32), np.zeros(tokens, bool)
    if joined:
        logprobs[joined["index"]] = joined["learner"]
        masked[joined["index"]] = joined["mask_fraction"] > 0
    return TrainedBatch(prepared.advantages.numpy(), logprobs, masked)


def _report(joined: Mapping[str, np.ndarray]) -> dict[str, float]:
    if not joined:
        return {}
    joined = dict(joined)
    del joined["index"]
    learner, behaviour, staleness = (joined.pop(name) for name in ("learner", "behaviour", "staleness"))
    clipped = [values for name, values in joined.items() if name.startswith("clip_fraction")]
    joined["clip_fraction"] = np.sum(clipped, axis=0) if clipped else np.zeros_like(learner)
    fractions = {name: joined[name] for name in FRACTIONS}
    means = {name: float(values.mean()) for name, values in joined.items()}
    return means | off_policy_report(learner, behaviour, staleness, fractions)


def _split_evenly(groups: Sequence[TrainGroup], parts: int) -> list[Sequence[TrainGroup]]:
    """Contiguous parts whose sizes differ by at most one; empty parts are left out."""
    bounds = [round(i * len(groups) / parts) for i in range(parts + 1)]
    return [groups[a:b] for a, b in pairwise(bounds) if b > a]
