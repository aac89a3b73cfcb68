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
from asyncrl.algorithms.corrections import Correction, correct, m2po_outliers
from asyncrl.algorithms.diagnostics import FRACTIONS, off_policy_report
from asyncrl.algorithms.losses import POLICY_LOSSES, LossFunction, PolicyLoss, reference_kl, token_weights
from asyncrl.algorithms.ratios import PolicyTokens, approximate_proximal
from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError
from asyncrl.journal.sample_index import TrainedBatch
from asyncrl.plugins import resolve
from learner.training.batch import Batch
from learner.training.engine import TorchEngine
from learner.training.packing import MicroBatch, TrainGroup, build_micro_batch, plan_micro_batches


class NotFiniteError(BadStateError):
    """A step stops: its loss or its gradient is not finite."""

    def __init__(self, number: str, message: str):
        """`number`: loss or grad_norm, as in metrics.jsonl."""
        super().__init__(message)
        self.number = number


@dataclass(frozen=True)
class _Prepared:
    """A batch and what is fixed before its first update. `M` are the batch's flat columns."""

    batch: Batch
    version: int
    advantages: torch.Tensor
    """[B]"""
    proximal: torch.Tensor | None
    """[M] log-probs of the policy at the start of the step, where a forward pass has computed them."""
    outliers: torch.Tensor | None
    """[M] bool, what the m2po mask drops."""


@dataclass(frozen=True)
class _MicroLoss:
    """The contribution of one micro-batch of N tokens to an update."""

    loss: torch.Tensor
    index: torch.Tensor
    """[N] places of its tokens in the batch's flat columns."""
    tokens: PolicyTokens
    entropies: torch.Tensor
    policy: PolicyLoss
    correction: Correction
    reference_kl: torch.Tensor | None
    """[N], where algorithm.kl_loss_coef asks for it."""


class LearnerStep:
    """The algorithm, bound to an engine. Calling it with a batch makes one step and returns its metrics."""

    trained: TrainedBatch
    """Each row and token of the last batch: what its metrics summarise."""

    def __init__(self, engine: TorchEngine, config: RunConfig):
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
            metrics["loss"].append(self._accumulate(groups, prepared, seen, where))
            try:
                taken = self.engine.optimizer_step()
            except BadStateError as error:
                raise NotFiniteError("grad_norm", f"{where}: {error}") from error
            for name, value in taken.items():
                metrics[name].append(value)
        columns = {name: torch.cat(parts).numpy() for name, parts in seen.items()}
        self.trained = _trained_batch(columns, prepared)
        return {name: float(np.mean(values)) for name, values in metrics.items()} | _report(columns)

    def _prepare(self, batch: Batch, version: int, num_updates: int) -> _Prepared:
        """Advantages, and what is decided over the whole batch."""
        algorithm = self.config.algorithm
        m2po = algorithm.correction.mask("m2po")
        # With a single update the policy does not move between this forward pass and the next: the proximal
        # log-probs are then the detached ones of the training pass itself, unless the whole batch needs them.
        needed = algorithm.proximal == "recompute" and (num_updates > 1 or m2po is not None)
        proximal = self._proximal_logprobs(batch) if needed else None
        outliers = None
        if m2po is not None and proximal is not None:
            _, index = batch.trained_tokens(batch.train_groups)
            outliers = torch.zeros(len(proximal), dtype=torch.bool)
            outliers[index] = m2po_outliers(proximal[index], batch.behaviour_logprobs[index], m2po.effective_threshold)
        advantages = self.estimator(batch.scores, batch.groups, algorithm).detach()
        return _Prepared(batch, version, advantages, proximal, outliers)

    @torch.no_grad()
    def _proximal_logprobs(self, batch: Batch) -> torch.Tensor:
        """[M] log-probs of the learner's policy at the start of the step; 0 where nothing is trained."""
        proximal = torch.zeros_like(batch.behaviour_logprobs)
        for micro_batch in self._micro_batches(batch.train_groups):
            index = batch.flat_index(micro_batch.row, micro_batch.column)
            proximal[index] = self.engine.forward(micro_batch).logprobs.cpu()
        return proximal

    def _accumulate(
        self, groups: Sequence[TrainGroup], prepared: _Prepared, seen: dict[str, list[torch.Tensor]], where: str
    ) -> float:
        """Add up the gradients of one update over its micro-batches. Returns the loss."""
        total = 0.0
        row, index = prepared.batch.trained_tokens(groups)
        weights = torch.zeros_like(prepared.batch.behaviour_logprobs)
        length = self.config.data.max_response_length
        weights[index] = token_weights(row, self.config.algorithm.loss_agg_mode, max_response_length=length)
        for number, micro_batch in enumerate(self._micro_batches(groups), 1):
            part = self._loss(micro_batch, prepared, weights)
            loss = float(part.loss.detach())
            if not math.isfinite(loss):
                raise NotFiniteError(
                    "loss",
                    f"{where}, micro-batch {number}: the loss is {loss}: {_describe_bad_tokens(part, prepared.batch)}. "
                    "The weights are those before this update. Look at these rows in the samples, and at the last "
                    "grad_norm and logprob_diff_max in metrics.jsonl",
                )
            self.engine.backward(part.loss)
            total += loss
            for name, column in _columns(part, prepared).items():
                seen[name].append(column.cpu())
        return total

    def _loss(self, micro_batch: MicroBatch, prepared: _Prepared, weights: torch.Tensor) -> _MicroLoss:
        """The loss of one micro-batch; `weights` [M] of the tokens are divided by the update's denominators."""
        algorithm, batch, device = self.config.algorithm, prepared.batch, self.engine.device
        index = batch.flat_index(micro_batch.row, micro_batch.column)
        reference = None
        if algorithm.kl_loss_coef:
            with self.engine.reference():
                reference = self.engine.forward(micro_batch).logprobs
        outputs = self.engine.forward(micro_batch, entropy="gradient" if algorithm.entropy_coeff else "value")
        assert outputs.entropies is not None
        behaviour = batch.behaviour_logprobs[index].to(device)
        tokens = PolicyTokens(
            logprobs=outputs.logprobs,
            proximal_logprobs=self._proximal(outputs.logprobs, behaviour, index, prepared),
            behaviour_logprobs=behaviour,
            advantages=prepared.advantages[micro_batch.row].to(device),
            row=micro_batch.row.to(device),
        )
        policy = self.loss(tokens, algorithm)
        outliers = None if prepared.outliers is None else prepared.outliers[index].to(device)
        correction = correct(tokens, algorithm.correction, outliers)
        token_loss = correction.weights * policy.token_loss
        if algorithm.entropy_coeff:
            token_loss = token_loss - algorithm.entropy_coeff * outputs.entropies
        kl = None if reference is None else reference_kl(outputs.logprobs, reference)
        if kl is not None:
            token_loss = token_loss + algorithm.kl_loss_coef * kl
        # `where`, because 0 * inf is not 0: nothing of a masked token may reach the sum or the gradient, neither its
        # policy loss nor entropy and KL, which are taken at a state that the policy would not have come to.
        loss = (weights[index].to(device) * torch.where(correction.masked, 0.0, token_loss)).sum()
        return _MicroLoss(loss, index, tokens, outputs.entropies, policy, correction, kl)

    def _proximal(
        self, logprobs: torch.Tensor, behaviour: torch.Tensor, index: torch.Tensor, prepared: _Prepared
    ) -> torch.Tensor:
        """[N] detached proximal log-probs of a micro-batch."""
        if prepared.proximal is not None:
            return prepared.proximal[index].to(logprobs.device)
        kind = self.config.algorithm.proximal
        if kind == "recompute":  # a single update: the policy has not moved since the step began
            return logprobs.detach()
        versions = torch.from_numpy(prepared.batch.versions)[index].to(logprobs.device)
        return approximate_proximal(kind, logprobs, behaviour, versions, prepared.version)

    def _micro_batches(self, groups: Sequence[TrainGroup]) -> Iterator[MicroBatch]:
        """Build one at a time: only one micro-batch's pixels are on the device."""
        for part in plan_micro_batches(groups, self.config.batch.tokens_per_microbatch):
            yield build_micro_batch(self.engine.unwrap_model(), part, self.engine.device)


def _describe_bad_tokens(part: _MicroLoss, batch: Batch) -> str:
    """The first value, in the order in which they are computed, that is not finite, and its rows."""
    values = {
        "the learner's log-prob": part.tokens.logprobs,
        "the entropy": part.entropies,
        "the engine's log-prob": part.tokens.behaviour_logprobs,
        "the proximal log-prob": part.tokens.proximal_logprobs,
        "the advantage": part.tokens.advantages,
        "the correction weight": part.correction.weights,
        "the policy loss": part.policy.token_loss,
    }
    if part.reference_kl is not None:
        values["the KL to the reference"] = part.reference_kl
    row = part.tokens.row.cpu()
    for name, value in values.items():
        bad = ~torch.isfinite(value.detach()).cpu()
        if bad.any():
            rows = batch.name_rows(row[bad].unique().tolist())
            return f"{name} is not finite at {int(bad.sum())} of {len(bad)} tokens, in {rows}"
    return f"every token's value is finite, but their sum is not, over {batch.name_rows(row.unique().tolist())}"


def _columns(part: _MicroLoss, prepared: _Prepared) -> dict[str, torch.Tensor]:
    """[N] each: what the report needs of a micro-batch's tokens.

    The learner's side of the ratios is its policy at the start of the step, where a forward pass has computed it, and
    else that of the training pass, which has moved with the earlier updates of this batch.
    """
    learner = part.tokens.logprobs.detach() if prepared.proximal is None else part.tokens.proximal_logprobs
    columns: dict[str, torch.Tensor] = {
        "index": part.index,
        "learner": learner,
        "behaviour": part.tokens.behaviour_logprobs,
        "staleness": prepared.version - torch.from_numpy(prepared.batch.versions)[part.index],
        "entropy": part.entropies.detach(),
        "mask_fraction": part.correction.masked.float(),
        "truncation_fraction": part.correction.truncated.float(),
        **{f"mask_fraction_{kind}": dropped.float() for kind, dropped in part.correction.masked_by.items()},
        **{name: indicator.float() for name, indicator in part.policy.indicators.items()},
    }
    if part.reference_kl is not None:
        columns["reference_kl"] = part.reference_kl.detach()
    return columns


def _trained_batch(columns: Mapping[str, np.ndarray], prepared: _Prepared) -> TrainedBatch:
    """The tokens of all micro-batches in the batch's flat columns."""
    tokens = len(prepared.batch.behaviour_logprobs)
    logprobs, masked = np.full(tokens, np.nan, np.float32), np.zeros(tokens, bool)
    if columns:
        logprobs[columns["index"]] = columns["learner"]
        masked[columns["index"]] = columns["mask_fraction"] > 0
    return TrainedBatch(prepared.advantages.numpy(), logprobs, masked)


def _report(columns: dict[str, np.ndarray]) -> dict[str, float]:
    """Means of the columns, and the off-policyness of the step. `columns` is used up."""
    if not columns:
        return {}
    _, learner, behaviour, staleness = (columns.pop(name) for name in ("index", "learner", "behaviour", "staleness"))
    clipped = [values for name, values in columns.items() if name.startswith("clip_fraction")]
    columns["clip_fraction"] = np.sum(clipped, axis=0) if clipped else np.zeros_like(learner)
    fractions = {name: columns[name] for name in FRACTIONS}
    means = {name: float(values.mean()) for name, values in columns.items()}
    return means | off_policy_report(learner, behaviour, staleness, fractions)


def _split_evenly(groups: Sequence[TrainGroup], parts: int) -> list[Sequence[TrainGroup]]:
    """Contiguous parts whose sizes differ by at most one; empty parts are left out."""
    bounds = [round(i * len(groups) / parts) for i in range(parts + 1)]
    return [groups[a:b] for a, b in pairwise(bounds) if b > a]
