"""The objective: the loss of one micro-batch, from the policy's forward pass and what the step has decided before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from asyncrl.algorithms.corrections import Correction, correct
from asyncrl.algorithms.kl import reference_kl
from asyncrl.algorithms.loading import load_method
from asyncrl.algorithms.losses import LossFunction, PolicyLoss, UpdateWeights
from asyncrl.algorithms.provenance import Provenance
from asyncrl.algorithms.ratios import PolicyTokens, approximate_proximal
from asyncrl.algorithms.selections import Selected, any_of
from asyncrl.config.algorithm import AlgorithmConfig
from learner.training.batch import Batch
from learner.training.controllers import StepCoefficients
from learner.training.loss_hook import PolicyPass, ScoringHook, WatchingHook, loss_hooks
from learner.training.packing import MicroBatch, TrainGroup
from learner.training.roles import Roles, Scored


@dataclass(frozen=True)
class Decided:
    """Values fixed for a batch before its first update. `N` runs over its trained tokens."""

    batch: Batch
    version: int
    """The policy's as it takes the batch."""
    scored: Scored
    advantages: torch.Tensor
    """[N]"""
    returns: torch.Tensor | None
    """[N] targets of the critic."""
    selected: Selected
    coefficients: StepCoefficients
    reward_kl: torch.Tensor | None
    """[N] KL to the reference at the start of the step, where it is in the reward."""

    @cached_property
    def left_out(self) -> torch.Tensor:
        """[N] bool: tokens of trajectories that a selection takes out of the batch."""
        return any_of(self.selected.from_batch, self.advantages)

    @cached_property
    def without_policy_loss(self) -> torch.Tensor:
        """[N] bool: tokens that a selection takes the policy loss of."""
        return any_of(self.selected.from_policy_loss, self.advantages)

    @cached_property
    def train_groups(self) -> tuple[TrainGroup, ...]:
        """The batch's groups without what the selections leave out."""
        gone = set(self.batch.trained.row[self.left_out].tolist())
        if not gone:
            return self.batch.train_groups
        kept = (
            replace(g, completions=tuple(c for c in g.completions if c.row not in gone))
            for g in self.batch.train_groups
        )
        return tuple(group for group in kept if group.completions)

    def versions(self, place: torch.Tensor) -> torch.Tensor:
        """Policy versions that sampled these tokens. [n] -> [n]"""
        return torch.from_numpy(self.batch.versions)[self.batch.trained.flat[place]]


@dataclass(frozen=True)
class MicroLoss:
    """The contribution of one micro-batch of `n` tokens to an update."""

    loss: torch.Tensor
    place: torch.Tensor
    """[n] places of its tokens among the batch's trained ones."""
    weights: torch.Tensor
    """[n] of the token losses in the update's loss."""
    tokens: PolicyTokens
    entropies: torch.Tensor
    policy: PolicyLoss
    correction: Correction
    reference_kl: torch.Tensor | None
    """[n], where algorithm.kl_loss_coef asks for it."""
    additional: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[n] each: columns of the hooks, by name."""

    def detached(self) -> MicroLoss:
        """Return it without the graph of its gradients."""
        kl = self.reference_kl
        return replace(
            self,
            loss=self.loss.detach(),
            tokens=replace(self.tokens, logprobs=self.tokens.logprobs.detach()),
            entropies=self.entropies.detach(),
            policy=replace(self.policy, token_loss=self.policy.token_loss.detach()),
            reference_kl=None if kl is None else kl.detach(),
        )

    def describe_bad_tokens(self, batch: Batch) -> str:
        """Name the first value, in the order in which they are computed, that is not finite, and its rows."""
        values = {
            "the learner's log-prob": self.tokens.logprobs,
            "the entropy": self.entropies,
            "the engine's log-prob": self.tokens.behaviour_logprobs,
            "the proximal log-prob": self.tokens.proximal_logprobs,
            "the advantage": self.tokens.advantages,
            "the correction weight": self.correction.weights,
            "the policy loss": self.policy.token_loss,
        }
        if self.reference_kl is not None:
            values["the KL to the reference"] = self.reference_kl
        values |= self.additional
        row = self.tokens.row.cpu()
        for name, value in values.items():
            bad = ~torch.isfinite(value.detach()).cpu()
            if bad.any():
                rows = batch.name_rows(row[bad].unique().tolist())
                return f"{name} is not finite at {int(bad.sum())} of {len(bad)} tokens, in {rows}"
        return f"every token's value is finite, but their sum is not, over {batch.name_rows(row.unique().tolist())}"


class Objective:
    """Policy loss times correction, KL to the reference and entropy bonus, summed with fixed weights."""

    def __init__(self, algorithm: AlgorithmConfig, roles: Roles):
        self._algorithm = algorithm
        self._hooks = loss_hooks(algorithm, roles)
        self.scoring = [hook for hook in self._hooks.values() if isinstance(hook, ScoringHook)]
        self._loss: LossFunction = load_method("policy_loss", algorithm.policy_loss, "algorithm.policy_loss")

    def __call__(
        self,
        roles: Roles,
        micro_batch: MicroBatch,
        decided: Decided,
        weights: UpdateWeights,
        *,
        number: int,
        update_tokens: int,
    ) -> MicroLoss:
        """`weights` [N]: of each of the batch's trained tokens in this update. `number`, `update_tokens`: of
        PolicyPass."""
        algorithm, device, selected = self._algorithm, roles.actor.device, decided.selected
        is_exact = bool(algorithm.kl_loss_coef) and algorithm.loss_kl_estimator == "full"
        trains_entropy = decided.coefficients.entropy_coeff or any(h.trains_entropy for h in self._hooks.values())
        watching = [hook for hook in self._hooks.values() if isinstance(hook, WatchingHook)]
        compared = [hook.before_pass(roles.actor, decided.batch, micro_batch) for hook in watching]
        comparisons = [*filter(None, compared), *([roles.reference.exact_kl(micro_batch)] if is_exact else [])]
        assert len(comparisons) < 2, "methods that compare distributions refuse each other"
        outputs = roles.actor.forward(
            micro_batch,
            entropy="gradient" if trains_entropy else "value",
            comparison=comparisons[0] if comparisons else None,
        )
        assert outputs.entropies is not None
        provenance = decided.batch.trained_provenance
        place = decided.batch.places(micro_batch.row, micro_batch.column)
        behaviour = decided.batch.behaviour_logprobs[decided.batch.trained.flat[place]].to(device)
        proximal = self._proximal(outputs.logprobs, behaviour, place, decided)
        tokens = PolicyTokens(
            logprobs=outputs.logprobs,
            proximal_logprobs=proximal,
            behaviour_logprobs=torch.where(provenance.lacks_behaviour[place].to(device), proximal, behaviour),
            advantages=decided.advantages[place].to(device),
            row=micro_batch.row.to(device),
            marked=None if selected.marked is None else selected.marked[place].to(device),
            provenance=self._provenance(decided.batch, place, device),
            entropies=outputs.entropies.detach(),
            scores=decided.batch.scores[micro_batch.row].to(device),
            version=decided.version,
        )
        policy = self._loss(tokens, algorithm)
        dropped = {name: chosen[place].to(device) for name, chosen in selected.from_loss.items()}
        correction = correct(tokens, algorithm.correction, dropped)
        silent = decided.without_policy_loss[place].to(device)
        token_loss = torch.where(silent, 0.0, correction.weights * policy.token_loss)
        of_policy = torch.zeros_like(token_loss)  # terms of a distribution that was sampled from
        kl = outputs.compared if is_exact else None
        if algorithm.kl_loss_coef and not is_exact:
            assert decided.scored.reference_logprobs is not None
            reference = decided.scored.reference_logprobs[place].to(device)
            kl = reference_kl(algorithm.loss_kl_estimator, outputs.logprobs, reference, behaviour)
        if kl is not None:
            of_policy = of_policy + decided.coefficients.kl_loss_coef * kl
        seen = PolicyPass(roles.actor, decided.batch, micro_batch, number, update_tokens, outputs)
        additional: dict[str, torch.Tensor] = {}
        of_update: list[torch.Tensor] = []
        for found in filter(None, (hook(seen) for hook in self._hooks.values())):
            of_policy = of_policy + found.token_loss
            additional |= found.columns
            of_update += [] if found.of_update is None or micro_batch.is_idle else [found.of_update]
        if tokens.provenance is not None:
            of_policy = torch.where(tokens.provenance.is_inserted, 0.0, of_policy)
        token_loss = token_loss + of_policy
        # `where`, because 0 * inf is not 0: nothing of a masked token may reach the sum or the gradient, neither its
        # policy loss nor entropy and KL, which are taken at a state that the policy would not have come to.
        here = weights.map(lambda column: column[place].to(device))
        loss = (here.loss * torch.where(correction.masked, 0.0, token_loss)).sum() + sum(of_update)
        if decided.coefficients.entropy_coeff:
            gone = correction.masked | (here.entropy == 0)
            entropies = torch.where(gone, 0.0, outputs.entropies)
            loss = loss - decided.coefficients.entropy_coeff * (here.entropy * entropies).sum()
        return MicroLoss(loss, place, here.loss, tokens, outputs.entropies, policy, correction, kl, additional)

    def _provenance(self, batch: Batch, place: torch.Tensor, device: torch.device) -> Provenance[torch.Tensor] | None:
        """Provenance of a micro-batch's tokens, where the method learns from inserted ones."""
        if "inserted" not in self._algorithm.needs:
            return None
        return batch.trained_provenance.of_tokens(place).map(lambda column: column.to(device))

    def _proximal(
        self, logprobs: torch.Tensor, behaviour: torch.Tensor, place: torch.Tensor, decided: Decided
    ) -> torch.Tensor:
        """[n] detached proximal log-probs of a micro-batch."""
        if decided.scored.proximal_logprobs is not None:
            return decided.scored.proximal_logprobs[place].to(logprobs.device)
        kind = self._algorithm.proximal
        if kind == "recompute":  # a single update: the policy has not moved since the step began
            return logprobs.detach()
        versions = decided.versions(place).to(logprobs.device)
        return approximate_proximal(kind, logprobs, behaviour, versions, decided.version)
