"""One learner step: score the roles -> credit -> select -> for each micro-batch the loss -> optimiser.

Decoupled PPO (arXiv 2505.24298): the clip is around the proximal policy, by default the learner's own at the start of
the step, and the correction weighs tokens by proximal over behaviour.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
import torch

from asyncrl.algorithms.advantages import AdvantageEstimator
from asyncrl.algorithms.diagnostics import FRACTIONS, explained_variance, off_policy_report
from asyncrl.algorithms.kl import penalise, reference_kl
from asyncrl.algorithms.loading import load_method
from asyncrl.algorithms.losses import update_weights, value_loss
from asyncrl.algorithms.selections import Selected, Selections
from asyncrl.algorithms.trajectories import Credit, Trajectories
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.installed_methods import method_of
from asyncrl.config.part_settings import StepSettings
from asyncrl.errors import BadStateError
from learner.training.batch import Batch, TrainedBatch
from learner.training.controllers import Coefficients
from learner.training.engine import TorchEngine
from learner.training.objective import Decided, MicroLoss, Objective
from learner.training.packing import MicroBatch, TrainGroup
from learner.training.roles import Roles, Scored
from learner.training.token_budget import TokenBudget
from learner.training.vision_features import VisionFeatures


class NotFiniteError(BadStateError):
    """A step stops: its loss or its gradient is not finite."""

    def __init__(self, number: str, message: str):
        """`number`: loss or grad_norm, as in metrics.jsonl."""
        super().__init__(message)
        self.number = number


class LearnerStep:
    """The algorithm, bound to its roles. Calling it with a batch makes one step and returns its metrics."""

    trained: TrainedBatch
    """Each row and token of the last batch: what its metrics summarise."""

    def __init__(self, roles: Roles, settings: StepSettings, *, total_steps: int = 1):
        """`total_steps` of the run."""
        self.roles = roles
        self.settings = settings
        self.budget = TokenBudget(roles, settings.microbatch_tokens)
        a = settings.algorithm
        self.estimator: AdvantageEstimator = load_method("advantage", a.adv_estimator, "algorithm.adv_estimator")
        self.select = Selections(a)
        self.objective = Objective(a, roles)
        self.coefficients = Coefficients(a, total_steps)

    @cached_property
    def _features(self) -> VisionFeatures | None:
        """Shared once the roles are prepared."""
        return self.roles.share_features(self.settings.learner)

    def __call__(self, batch: Batch, version: int) -> dict[str, float]:
        """One optimiser step per `updates_per_batch`; `version` is the policy's as it takes the batch.

        Raises NotFiniteError when a loss or a gradient is not finite; the weights are then those before that update.
        Raises BadStateError where there is no memory for a single row, or for an optimiser step.
        """
        features = self._features
        decided = self._decide(batch, version)
        updates = _split_evenly(decided.train_groups, self.settings.algorithm.updates_per_batch)
        seen: dict[str, list[torch.Tensor]] = defaultdict(list)
        metrics: dict[str, list[float]] = defaultdict(list)
        for number, groups in enumerate(updates, 1):
            where = f"step {version + 1} (policy version {version}), update {number} of {len(updates)}"
            loss, columns = self.budget.run(partial(self._accumulate, groups, decided, where), groups, where)
            metrics["loss"].append(loss)
            for name, parts in columns.items():
                seen[name] += parts
            for prefix, role in self._stepped(version):
                taken = self.budget.update(partial(_optimizer_step, role, prefix, where), where)
                for name, value in taken.items():
                    metrics[f"{prefix}{name}"].append(value)
        if decided.returns is not None and decided.scored.values is not None:
            variance = explained_variance(decided.scored.values, decided.returns)
            metrics["critic/explained_variance"].append(variance)
        joined = {name: torch.cat(parts).cpu() for name, parts in seen.items()}
        columns = {
            name: values.numpy() for name, values in self.roles.ranks.merge(joined, len(batch.trained.row)).items()
        }
        self.trained = _trained_batch(columns, decided)
        self._move_on(columns, decided)
        means = {name: float(np.mean(values)) for name, values in metrics.items()}
        means |= self.budget.report() | (features.report(self.roles.ranks.total) if features else {})
        said = decided.selected.report() | self.coefficients.report(decided.coefficients)
        return means | said | _take_supervised(columns, len(updates)) | _report(columns)

    def _move_on(self, columns: Mapping[str, np.ndarray], decided: Decided) -> None:
        """Let the reference and the coefficients follow what the step has made and seen."""
        if self.roles.own_reference:
            self.roles.own_reference.follow(self.roles.actor, decided.version + 1)
        if columns:
            place = torch.from_numpy(columns["place"])
            sampled = ~decided.batch.trained_provenance.is_inserted[place]
            entropies = torch.from_numpy(columns["entropy"])[sampled]
            kl = torch.from_numpy(columns["reference_kl"])[sampled] if "reference_kl" in columns else None
            self.coefficients.observe(entropies, kl, decided.batch.trained.row[place][sampled])

    def _stepped(self, version: int) -> list[tuple[str, TorchEngine]]:
        """Roles whose weights change in this step, with the prefix of their metrics."""
        actor = [("", self.roles.actor)] if self._trains_actor(version) else []
        return [*actor, *([("critic/", self.roles.critic)] if self.roles.critic else [])]

    def _decide(self, batch: Batch, version: int) -> Decided:
        """Score the roles, give credit, select: all that is decided over the whole batch."""
        algorithm, coefficients = self.settings.algorithm, self.coefficients.of_step(version)
        # With a single update the policy does not move between this forward pass and the next: the proximal
        # log-probs are then the detached ones of the training pass itself, unless the whole batch needs them.
        num_updates = min(algorithm.updates_per_batch, len(batch.train_groups))
        moves = algorithm.proximal == "recompute" and num_updates > 1
        reads_reference = "reference" in algorithm.needs and algorithm.kl_estimator != "full"
        wanted = {
            "proximal_logprobs": moves or algorithm.needs & {"proximal", "entropies"},
            "entropies": "entropies" in algorithm.needs,
            "squared_probabilities": "squared_probabilities" in algorithm.needs,
            "reference_logprobs": reads_reference and not self.objective.scoring,
            "exact_kl": algorithm.kl_reward_coef and algorithm.kl_estimator == "full",
            "values": "critic" in algorithm.needs,
        }
        names = [name for name, is_wanted in wanted.items() if is_wanted]
        where = f"step {version + 1}, scores before its updates"
        scored = self.budget.run(partial(self.roles.score, batch, names), batch.train_groups, where)
        for hook in self.objective.scoring:
            scored = self.budget.run(partial(hook.score, batch, scored), batch.train_groups, where)
        behaviour = batch.behaviour_logprobs[batch.trained.flat]
        if scored.proximal_logprobs is not None:
            behaviour = torch.where(batch.trained_provenance.lacks_behaviour, scored.proximal_logprobs, behaviour)
        trajectories = Trajectories(
            scores=batch.scores,
            components=batch.components,
            group=batch.groups,
            provenance=batch.trained_provenance,
            is_truncated=batch.is_truncated,
            row=batch.trained.row,
            behaviour_logprobs=behaviour,
            component_weights=self.settings.reward_weights,
            proximal_logprobs=scored.proximal_logprobs,
            entropies=scored.entropies,
            squared_probabilities=scored.squared_probabilities,
            values=scored.values,
            reference_logprobs=scored.reference_logprobs,
            seed=version,
            **self._turns(batch),
        )
        reward_kl = _reward_kl(scored, algorithm)
        if reward_kl is not None:
            reward_kl = torch.where(batch.trained_provenance.is_inserted, 0.0, reward_kl)
            trajectories = penalise(trajectories, coefficients.kl_reward_coef * reward_kl)
        credit = self._credit(trajectories)
        return Decided(
            batch=batch,
            version=version,
            scored=scored,
            advantages=credit.advantages.detach(),
            returns=credit.returns,
            selected=self._selected(batch, self.select(trajectories, credit)),
            coefficients=coefficients,
            reward_kl=reward_kl,
        )

    def _turns(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Columns of turns where there is an environment."""
        environment = self.settings.environment
        if not environment.is_used:
            return {}
        return batch.turns(zero_over_limit=environment.over_limit == "zero")._asdict()

    def _selected(self, batch: Batch, selected: Selected) -> Selected:
        """The selections' choices, and trajectories that a limit ended where these are masked: their scores stay in the
        statistics of their groups, and their tokens in the loss's denominators, so that what is masked makes no other
        row weigh more (Mini-o3, https://arxiv.org/abs/2509.07969)."""
        environment = self.settings.environment
        if not environment.is_used or environment.over_limit != "mask":
            return selected
        tokens = batch.is_over_limit[batch.trained.row]
        return replace(selected, from_loss={**selected.from_loss, "over_limit": tokens})

    def _credit(self, trajectories: Trajectories) -> Credit:
        """Give credit to what the policy sampled, and to inserted completions where the loss takes them as members."""
        algorithm = self.settings.algorithm
        loss = method_of("policy_loss", algorithm.policy_loss)
        all_members = "inserted" not in algorithm.needs or (loss is not None and loss.credits_inserted)
        if all_members or trajectories.provenance is None:
            return self.estimator(trajectories, algorithm)
        return self.estimator(trajectories.of_policy(), algorithm).spread(~trajectories.provenance.is_inserted)

    def _accumulate(
        self, groups: Sequence[TrainGroup], decided: Decided, where: str, tokens_per_microbatch: int
    ) -> tuple[float, dict[str, list[torch.Tensor]]]:
        """Add up the gradients of one update over its micro-batches. Returns the loss, and columns of the report.

        Nothing is fetched from the device before the last one: the next micro-batch is packed while one is computed.
        """
        parts: list[MicroLoss] = []
        seen: dict[str, list[torch.Tensor]] = defaultdict(list)
        batch, place = decided.batch, decided.batch.places_of(groups)
        row = batch.trained.row[place]
        of_update = update_weights(
            row,
            batch.groups[row],
            batch.trained_provenance.is_inserted[place],
            self.settings.algorithm,
            max_response_length=self.settings.max_response_length,
        )
        nothing = torch.zeros(len(batch.trained.row))
        weights = of_update.map(lambda column: nothing.index_put((place,), column))
        plan = self.roles.plan(groups, tokens_per_microbatch)
        tokens = sum(g.num_tokens for shares in plan for share in shares if not share.is_idle for g in share.groups)
        for number, micro_batch in enumerate(self.roles.micro_batches(plan), 1):
            with torch.set_grad_enabled(self._trains_actor(decided.version)):
                here = weights.map(torch.zeros_like) if micro_batch.is_idle else weights
                part = self.objective(self.roles, micro_batch, decided, here, number=number, update_tokens=tokens)
            is_last = number == len(plan)
            if self._trains_actor(decided.version):
                self.roles.actor.backward(part.loss, is_last=is_last)
            parts.append(part := part.detached())
            of_critic = self._train_critic(micro_batch, part.place, decided, len(place), is_last)
            columns = _columns(part, decided) | of_critic
            for name, column in columns.items():
                seen[name].append(column[:0] if micro_batch.is_idle else column)
        losses = torch.stack([part.loss for part in parts]).tolist()
        bad = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
        problem = None
        if bad:
            problem = (
                f"{where}, micro-batch {bad[0] + 1}: the loss is {losses[bad[0]]}: "
                f"{parts[bad[0]].describe_bad_tokens(decided.batch)}. "
                "The weights are those before this update. Look at these rows in the samples, and at the last "
                "grad_norm and logprob_diff_max in metrics.jsonl"
            )
        if agreed := self.roles.ranks.agree(problem):
            raise NotFiniteError("loss", agreed)
        return self.roles.ranks.total(sum(losses)), seen

    def _trains_actor(self, version: int) -> bool:
        """False while the critic warms up."""
        return self.roles.critic is None or version >= self.settings.critic.warmup_steps

    def _train_critic(
        self, micro_batch: MicroBatch, place: torch.Tensor, decided: Decided, num_tokens: int, is_last: bool
    ) -> dict[str, torch.Tensor]:
        """Add up the critic's gradient, of the mean over the update's tokens. Returns columns [n] of the report."""
        critic, returns, old = self.roles.critic, decided.returns, decided.scored.values
        if critic is None or returns is None or old is None:
            return {}
        here = critic.device
        values = critic.values(micro_batch)
        loss = value_loss(values, old[place].to(here), returns[place].to(here), self.settings.critic.clip_range)
        critic.backward(loss.token_loss.sum() / num_tokens * (not micro_batch.is_idle), is_last=is_last)
        return {
            "critic/loss": loss.token_loss.detach(),
            "critic/clip_fraction": loss.clipped.float(),
            "critic/value": values.detach(),
        }


def _optimizer_step(role: TorchEngine, prefix: str, where: str) -> dict[str, float]:
    try:
        return role.optimizer_step()
    except BadStateError as error:
        raise NotFiniteError(f"{prefix}grad_norm", f"{where}: {error}") from error


def _columns(part: MicroLoss, decided: Decided) -> dict[str, torch.Tensor]:
    """[n] each: what the report needs of a micro-batch's tokens.

    The learner's side of the ratios is its policy at the start of the step, where a forward pass has computed it, and
    else that of the training pass, which has moved with the earlier updates of this batch.
    """
    moved = decided.scored.proximal_logprobs is None
    columns: dict[str, torch.Tensor] = {
        "place": part.place,
        "lacks_behaviour": decided.batch.trained_provenance.lacks_behaviour[part.place],
        "learner": part.tokens.logprobs if moved else part.tokens.proximal_logprobs,
        "behaviour": part.tokens.behaviour_logprobs,
        "staleness": decided.version - decided.versions(part.place),
        "entropy": part.entropies,
        "mask_fraction": part.correction.masked.float(),
        "truncation_fraction": part.correction.truncated.float(),
        **{f"mask_fraction_{kind}": dropped.float() for kind, dropped in part.correction.masked_by.items()},
        **{name: indicator.float() for name, indicator in part.policy.indicators.items()},
    }
    if part.reference_kl is not None:
        columns["reference_kl"] = part.reference_kl
    elif decided.reward_kl is not None:
        columns["reference_kl"] = decided.reward_kl[part.place]
    elif (theirs := decided.scored.reference_logprobs) is not None and decided.scored.proximal_logprobs is not None:
        columns["reference_kl"] = (decided.scored.proximal_logprobs - theirs)[part.place]
    columns |= part.additional
    if part.tokens.provenance is not None:
        columns["inserted"] = part.tokens.provenance.is_inserted
        columns["loss/supervised"] = part.weights * part.policy.token_loss
        if part.policy.supervised_weight is not None:
            columns["supervised_weight"] = part.weights * part.policy.supervised_weight
    return columns


def _reward_kl(scored: Scored, algorithm: AlgorithmConfig) -> torch.Tensor | None:
    """[N] KL to the reference that is taken from the rewards; None where none is."""
    if not algorithm.kl_reward_coef:
        return None
    if scored.exact_kl is not None:
        return scored.exact_kl
    assert scored.proximal_logprobs is not None
    assert scored.reference_logprobs is not None
    return reference_kl(algorithm.reward_kl_estimator, scored.proximal_logprobs, scored.reference_logprobs)


def _trained_batch(columns: Mapping[str, np.ndarray], decided: Decided) -> TrainedBatch:
    """The tokens of all micro-batches in the batch's flat columns, and the mean advantage of each row's tokens."""
    batch, tokens = decided.batch, len(decided.batch.behaviour_logprobs)
    row, flat = batch.trained.row, batch.trained.flat.numpy()
    logprobs, masked = np.full(tokens, np.nan, np.float32), np.zeros(tokens, bool)
    masked[flat] = decided.left_out.numpy()
    if columns:
        logprobs[flat[columns["place"]]] = columns["learner"]
        masked[flat[columns["place"]]] = columns["mask_fraction"] > 0
    sums = torch.zeros(len(batch.scores), dtype=torch.float64).index_add(0, row, decided.advantages.double())
    counts = torch.bincount(row, minlength=len(sums)).clamp_min(1)
    return TrainedBatch((sums / counts).float().numpy(), logprobs, masked)


def _take_supervised(columns: dict[str, np.ndarray], num_updates: int) -> dict[str, float]:
    """Take the inserted tokens out of the columns, and return what they add to an update: to its loss, and as weight of
    their negative log-likelihood. Means over the updates."""
    if "inserted" not in columns:
        return {}
    inserted = columns.pop("inserted")
    said = {"inserted/tokens": float(inserted.sum() / num_updates)}
    for name in ("loss/supervised", "supervised_weight"):
        if name in columns:
            said[name] = float(columns.pop(name)[inserted].sum() / num_updates)
    if inserted.any():
        said["inserted/logprob"] = float(columns["learner"][inserted].mean())
    for name, values in columns.items():
        columns[name] = values[~inserted]
    return said


def _report(columns: dict[str, np.ndarray]) -> dict[str, float]:
    """Means of the columns, and the off-policyness of the step. `columns` is used up."""
    if not columns or not len(columns["learner"]):
        return {}
    names = ("lacks_behaviour", "learner", "behaviour", "staleness")
    lacks_behaviour, learner, behaviour, staleness = (columns.pop(name) for name in names)
    sampled_so = ~lacks_behaviour
    del columns["place"]
    clipped = [values for name, values in columns.items() if name.startswith("clip_fraction")]
    columns["clip_fraction"] = np.sum(clipped, axis=0) if clipped else np.zeros_like(learner)
    fractions = {name: columns[name][sampled_so] for name in FRACTIONS}
    means = {name: float(values.mean()) for name, values in columns.items()}
    return means | off_policy_report(learner[sampled_so], behaviour[sampled_so], staleness[sampled_so], fractions)


def _split_evenly(groups: Sequence[TrainGroup], parts: int) -> list[Sequence[TrainGroup]]:
    """Contiguous parts whose sizes differ by at most one; empty parts are left out."""
    bounds = [round(i * len(groups) / parts) for i in range(parts + 1)]
    return [groups[a:b] for a, b in pairwise(bounds) if b > a]
