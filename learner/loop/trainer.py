"""The trainer: a run's model, optimiser and algorithm, without sockets or files.

It makes a learner's steps, and makes them again after a restart and for `asyncrl replay`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from asyncrl.config.installed_methods import chosen_hooks, method_of
from asyncrl.config.schema import RunConfig, changed
from asyncrl.devices.device import resolve_device
from asyncrl.memory_plan import size
from asyncrl.memory_plan.lines import CONTEXT_BYTES
from asyncrl.memory_plan.plan import check_plan, device_sharing, engine_fills
from asyncrl.memory_plan.token_choice import settle_layers, settle_tokens
from asyncrl.model_files.folder import base_fingerprint
from asyncrl.models.export import check_export
from asyncrl.models.parts import trains_language_model
from asyncrl.plugins import implementation
from asyncrl.processing.processor import PromptProcessor
from learner.groups.ticket import ReceivedGroup
from learner.loop.checkpoint import LearnerState, Snapshot, check_adapter, policy_files, restore_engines
from learner.ranks.commands import pack_groups
from learner.ranks.group import ALONE, Ranks
from learner.training.batch import Batch, describe_batch, make_batch
from learner.training.engine import TorchEngine
from learner.training.reference import FOLDER as REFERENCE_FOLDER
from learner.training.reference import Reference
from learner.training.roles import FOLDER as CRITIC_FOLDER
from learner.training.roles import Critic, Roles
from learner.training.step import LearnerStep

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """Position of a run. One step publishes one version, so the two run in parallel from their starts."""

    total_steps: int
    step: int = 0
    version: int = 0

    @property
    def is_last(self) -> bool:
        return self.step >= self.total_steps


class StalenessController(Protocol):
    """Moves the staleness bound by what steps measure. A method of the kind `staleness_controller` names a class, which
    is made with the method's settings and learner.max_staleness, the largest bound."""

    bound: int
    """Staleness bound by which new tickets are admitted."""

    def observe(self, ess: float, mismatch_kl: float) -> object:
        """Take one step's effective sample size and mismatch KL (k3), NaN where it measured none."""
        ...

    def state(self) -> dict[str, int]:
        """State for the checkpoint."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        ...


def staleness_controllers(config: RunConfig) -> dict[str, StalenessController]:
    """Controllers that the configuration chooses, by the names of their methods."""
    found = chosen_hooks("staleness_controller", config.algorithm).items()
    largest = config.learner.max_staleness
    return {name: implementation(method.implementation)(settings, largest) for name, (method, settings) in found}


class Trainer:
    """Engine, algorithm and progress of a run. `learn` makes the next step."""

    def __init__(
        self,
        config: RunConfig,
        processor: PromptProcessor,
        num_rows: int,
        checkpoint: Path | None = None,
        state: LearnerState | None = None,
        ranks: Ranks = ALONE,
    ):
        """Start at the checkpoint, whose content is `state`, or else at the beginning.

        `config.model.path` is the folder of the weights to load: the checkpoint's, unless that holds an adapter.
        """
        self.processor = processor
        self.ranks = ranks
        self.progress = Progress(config.total_steps(num_rows))
        warmup = config.critic.warmup_steps if "critic" in config.algorithm.needs else 0
        updates, waited = (steps * config.algorithm.updates_per_batch for steps in (self.progress.total_steps, warmup))
        device = ranks.own(resolve_device(config.learner.device, "learner.device"))
        config, said = settle_layers(with_token_budget(config, device, ranks), ranks.size)
        if said and ranks.leads:
            logger.info("%s", said)
        room = check_room(config, device, ranks.size)
        self.config = config
        self.engine = TorchEngine(config.model_settings, config.learner.optim, max(updates - waited, 1), ranks)
        adapter = self.engine.adapter
        self.base = base_fingerprint(config.model) if adapter else ""
        if checkpoint and state:
            check_adapter(checkpoint, state, adapter, self.base)
        self.engine.prepare()
        if ranks.leads:
            check_export(self.engine.model, processor.processor)
        self.architecture = self.engine.facts.architecture
        self.critic = (
            Critic(config.critic_settings, config.critic, updates, ranks)
            if "critic" in config.algorithm.needs
            else None
        )
        if self.critic:
            self.critic.prepare()
        self.reference = (
            Reference(config.reference_settings, config.reference, ranks) if config.reference_model else None
        )
        if config.learner.engine == "fsdp2" and trains_language_model(self.engine.model):  # else texts have no gradient
            reduce_once([role for role in (self.engine, self.critic) if role], room, ranks)
        if self.reference:
            self.reference.prepare()
            with self.reference.on_device():
                self.reference.check_fits(self.engine, compares_distributions=config.algorithm.kl_estimator == "full")
        self.engine.companions = tuple(role for role in (self.critic, self.reference) if role)
        if checkpoint and state:
            restore_engines(checkpoint, self.engine, self.saved_roles)
            self.progress.step, self.progress.version = state.step, state.version
        total = self.progress.total_steps
        roles = Roles(self.engine, self.critic, self.reference, ranks)
        self.step = LearnerStep(roles, config.step_settings, total_steps=total)
        if state:
            self.step.coefficients.restore(state.controllers)
        self._controllers = staleness_controllers(config)
        for name, controller in self._controllers.items():
            if state and name in state.controllers:
                controller.restore(state.controllers[name])

    @property
    def saved_roles(self) -> dict[str, TorchEngine]:
        """Engines beside the policy's that a checkpoint holds, by the names of their folders."""
        reference = self.reference if self.config.reference.moves else None
        roles = {CRITIC_FOLDER: self.critic, REFERENCE_FOLDER: reference}
        return {name: role for name, role in roles.items() if role}

    @property
    def roles(self) -> dict[str, TorchEngine]:
        """All engines by their names."""
        return {role.role: role for role in (self.engine, self.critic, self.reference) if role}

    @property
    def bound(self) -> int:
        """Staleness bound of tickets issued from now on."""
        bounds = (controller.bound for controller in self._controllers.values())
        return min(bounds, default=self.config.learner.max_staleness)

    def learn(self, groups: Sequence[ReceivedGroup]) -> tuple[Batch, dict[str, float]]:
        """Make one step, on all ranks. Returns its batch and its metrics, except durations."""
        self.ranks.announce("learn", lambda: pack_groups(groups))
        algorithm = self.config.algorithm
        batch = make_batch(
            groups,
            self.processor,
            inserted="inserted" in algorithm.needs,
            defers_pixels=self.ranks.size > 1,  # a rank needs those of its share alone
        )
        version = self.progress.version
        estimator, accuracy = method_of("advantage", algorithm.adv_estimator), self.config.reward.accuracy_component
        compares = estimator is not None and estimator.compares_rows
        values = describe_batch(batch, version, accuracy, compares_rows=compares) | self.step(batch, version)
        before = self.bound
        for controller in self._controllers.values():
            controller.observe(values.get("ess", nan), values.get("mismatch_kl_k3", nan))
        if self.bound != before:
            logger.info("max_staleness moves from %d to %d", before, self.bound)
        self.progress.step += 1
        self.progress.version += 1
        if algorithm.replays_groups:
            values["replayed_groups"] = float(sum(item.is_replayed for item in groups))
        values |= self.step.roles.work.report(self.ranks, self.engine.device)
        if type(layers := self.config.learner.gradient_checkpointing) is int:
            values["memory/checkpointed_layers"] = float(layers)
        return batch, values | {"staleness/bound": float(self.bound)}

    def snapshot(self, run_id: str, building: Path, *, copies: bool) -> Snapshot:
        """Snapshot of a checkpoint of this step, on all ranks, which write it into the folder `building`.

        `copies`: training may go on before it is written.
        """
        self.ranks.announce("snapshot", folder=str(building), copies=copies)
        name, model = policy_files(self.engine, self.processor.processor, self.base, copies=copies)
        roles = {"": self.engine, **self.saved_roles}
        files = {folder: role.files(copies=copies) for folder, role in roles.items()}
        return Snapshot(self._state(run_id), torch.get_rng_state(), name, model, files)

    def _state(self, run_id: str) -> LearnerState:
        adapter = self.engine.adapter
        return LearnerState(
            step=self.progress.step,
            version=self.progress.version,
            architecture=self.architecture,
            run_id=run_id,
            adapter=adapter.model_dump(mode="json") if adapter else None,
            base=self.base,
            controllers={
                **{name: controller.state() for name, controller in self._controllers.items()},
                **self.step.coefficients.state(),
            },
        )


def with_token_budget(config: RunConfig, device: torch.device, ranks: Ranks) -> RunConfig:
    """The configuration with a number in the place of batch.tokens_per_microbatch=auto, before anything is loaded.

    A collective: all ranks choose by the memory of the one that has least. Of a GPU that nobody else of the run is on,
    what other processes hold is left to them.
    """
    if config.batch.tokens_per_microbatch != "auto":
        return config
    config = changed(config, {"learner.num_processes": ranks.size})  # torchrun says how many
    room = 0
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
        if device_sharing(config) == "apart":
            room = min(room, torch.cuda.mem_get_info(device)[0] + CONTEXT_BYTES)  # the plan counts this one's context
        room = -ranks.most(-room)
    settled, chosen = settle_tokens(config, room)
    if ranks.leads:
        logger.info("%s", chosen)
    return settled


def check_room(config: RunConfig, device: torch.device, ranks: int) -> int:
    """Plan the memory of a GPU without a budget too (with one, the launch has). Raises UserError where it cannot fit:
    said in seconds, with the settings that help, instead of by CUDA in the first long batch. Returns the bytes that are
    left to each of several ranks: on CPUs of a quarter of the memory, which restarts do not change."""
    budget_gib, on_gpu = config.gpu_memory.budget_gib, device.type == "cuda"
    if ranks == 1 and (budget_gib or not on_gpu):
        return 0
    if not budget_gib and not on_gpu:
        return psutil.virtual_memory().total // (4 * ranks)
    config = changed(config, {"learner.num_processes": ranks})  # torchrun says how many
    plan = check_plan(config, torch.cuda.get_device_properties(device).total_memory if on_gpu else 0)
    if plan is None:
        return 0
    logger.info("planned: at most %s on %s", size(plan.peak), device)
    return 0 if engine_fills(config) else plan.budget - plan.phases[0].nbytes


def reduce_once(roles: Sequence[TorchEngine], room: int, ranks: Ranks) -> None:
    """Let each rank add up whole gradients of an update's micro-batches, if they fit into these bytes on all ranks."""
    whole, room = sum(4 * parameter.numel() for role in roles for parameter in role.trained), -ranks.most(-room)
    for role in roles:
        role.reduces_once = ranks.size > 1 and whole <= room
    if ranks.leads and ranks.size > 1:
        how = "once in an update" if whole <= room else "after each micro-batch"
        logger.info("gradients are reduced %s: whole ones take %s, of %s on each rank", how, size(whole), size(room))
