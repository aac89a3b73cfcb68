"""The trainer of a supervised run: engine, steps, held-out loss and checkpoints, on one process or on each rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.schema import RunConfig, changed
from asyncrl.errors import BadStateError
from asyncrl.memory_plan.plan import check_plan
from asyncrl.model_files.folder import base_fingerprint
from asyncrl.models.export import check_export
from asyncrl.processing.processor import PromptProcessor
from asyncrl.run_folder.contents import MODEL_FOLDER
from asyncrl_plugins.sft.settings import settings_of
from learner.loop.checkpoint import (
    LearnerState,
    Snapshot,
    check_adapter,
    make_building_folder,
    policy_files,
    restore_engines,
    save_checkpoint,
)
from learner.loop.follower import Obey, engine_calls
from learner.loop.trainer import check_room, with_token_budget
from learner.ranks.commands import RankCommand
from learner.ranks.group import ALONE, Ranks
from learner.training.engine import TorchEngine
from learner.training.packing import PackedTrajectory, TrainGroup
from learner.training.roles import Roles
from learner.training.token_budget import TokenBudget
from protocol.messages import Prompt

TOKENS = "batch.tokens_per_microbatch"
"""Number in a checkpoint: sums of other micro-batches would have other last bits."""


@dataclass(frozen=True)
class Demonstration:
    """A row: its prompt, and the answer that is to be learnt."""

    prompt: Prompt
    blobs: Mapping[str, bytes]
    """Encoded images and frames by content hash."""
    target: Sequence[int]
    """Token ids, the end of the turn included."""


@dataclass(frozen=True)
class Saved:
    """Checkpoint that a run continues from."""

    folder: Path
    state: LearnerState

    @property
    def settings(self) -> dict[str, Any]:
        """Settings and rows of the run that made it."""
        return self.state.controllers


class SupervisedTrainer:
    """Engine and steps of a supervised run. Of several ranks each has one, which makes every step."""

    def __init__(
        self,
        config: RunConfig,
        processor: PromptProcessor,
        num_steps: int,
        ranks: Ranks = ALONE,
        saved: Saved | None = None,
    ):
        """Raises UserError where `saved` is of another model."""
        self.config, self.processor, self.ranks = config, processor, ranks
        self.settings = settings_of(config)
        whole = saved.folder / MODEL_FOLDER if saved and not saved.state.adapter else None
        self.engine = TorchEngine(config.with_policy(whole).model_settings, self.settings.optim, num_steps, ranks)
        self.base = base_fingerprint(config.model) if self.engine.adapter else ""
        if saved:
            check_adapter(saved.folder, saved.state, self.engine.adapter, self.base)
        is_chosen = config.batch.tokens_per_microbatch == "auto"
        kept = saved.settings[TOKENS] if saved and is_chosen else None
        tokens = kept or choose_tokens(config, self.engine.device, ranks)
        self.engine.prepare()
        if ranks.leads:
            check_export(self.engine.model, processor.processor)
        if saved:
            restore_engines(saved.folder, self.engine, {})
        self.roles = Roles(self.engine, ranks=ranks)
        self.features = self.roles.share_features(config.learner)
        self.budget = TokenBudget(self.roles, tokens)

    def learn(self, step: int, demonstrations: Sequence[Demonstration]) -> dict[str, float]:
        """One optimiser step on the mean negative log-likelihood per target token, on all ranks."""
        self.ranks.announce("learn", lambda: _pack(demonstrations), step=step)
        groups = self._groups(demonstrations)
        targets = sum(len(each.target) for each in demonstrations)
        loss = self.budget.run(partial(self._accumulate, groups, targets), groups, f"step {step}")
        if not math.isfinite(loss):
            raise BadStateError(f"the loss is {loss}: lower sft.optim.lr ({self.settings.optim.lr})")
        updated = self.budget.update(self.engine.optimizer_step, f"step {step}")
        return {"loss": loss, "tokens": float(targets), **updated, **self.budget.report(), **self._work()}

    def _work(self) -> dict[str, float]:
        """Work of the ranks since the last report, and the features that were used again."""
        reused = self.features.report(self.ranks.total) if self.features else {}
        return {**reused, **self.roles.work.report(self.ranks, self.engine.device)}

    def _accumulate(self, groups: Sequence[TrainGroup], targets: int, tokens_per_microbatch: int) -> float:
        """Add up the gradients of a step over its micro-batches. Returns the loss."""
        total = 0.0
        for micro_batch in self.roles.micro_batches(self.roles.plan(groups, tokens_per_microbatch)):
            loss = -self.engine.forward(micro_batch).logprobs.sum() / targets * (not micro_batch.is_idle)
            self.engine.backward(loss)
            total += float(loss.detach())
        return self.ranks.total(total)

    def held_out_nats(self, demonstrations: Sequence[Demonstration]) -> float:
        """Sum of the targets' negative log-likelihoods, on all ranks. Nothing is learnt."""
        self.ranks.announce("held_out_nats", lambda: _pack(demonstrations))
        groups = self._groups(demonstrations)
        nats = self.budget.run(partial(self._nats, groups), groups, "held-out rows")
        self._work()  # of no step
        return nats

    @torch.no_grad()
    def _nats(self, groups: Sequence[TrainGroup], tokens_per_microbatch: int) -> float:
        batches = self.roles.micro_batches(self.roles.plan(groups, tokens_per_microbatch))
        sums = [-self.engine.forward(each).logprobs.double().sum() * (not each.is_idle) for each in batches]
        return self.ranks.total(float(sum(sums)))

    def _groups(self, demonstrations: Sequence[Demonstration]) -> list[TrainGroup]:
        return [self._group(row, each) for row, each in enumerate(demonstrations)]

    def _group(self, row: int, shown: Demonstration) -> TrainGroup:
        """The prompt with its one completion; several ranks compute the pixels of their shares alone."""
        encode = partial(self.processor.encode, shown.prompt, shown.blobs)
        ids = np.asarray(shown.target, np.int32)
        completion = PackedTrajectory(row, ids, np.ones(len(ids), np.uint8))
        if self.ranks.size == 1:
            return TrainGroup(encode(), (completion,))
        measured = self.processor.measure(shown.prompt, shown.blobs)
        return TrainGroup(measured, (completion,), encode)

    def save(self, step: int, settings: Mapping[str, Any]) -> Path:
        """Write the checkpoint of this step on all ranks, and keep the newest trainer.save_limit. `settings` stand in
        it."""
        building = make_building_folder(self.config.run_path, step)
        self.ranks.announce("save", folder=str(building), step=step)
        snapshot = self.snapshot(step, {**settings, TOKENS: self.budget.tokens})
        return save_checkpoint(self.config.run_path, building, snapshot, self.config.trainer.save_limit)

    def snapshot(self, step: int, settings: Mapping[str, Any]) -> Snapshot:
        name, model = policy_files(self.engine, self.processor.processor, self.base, copies=False)
        state = LearnerState(
            step=step,
            version=step,
            architecture=self.engine.facts.architecture,
            run_id="",
            adapter=self.engine.adapter.model_dump(mode="json") if self.engine.adapter else None,
            base=self.base,
            controllers=dict(settings),
        )
        return Snapshot(state, torch.get_rng_state(), name, model, {"": self.engine.files(copies=False)})


def choose_tokens(config: RunConfig, device: torch.device, ranks: Ranks) -> int:
    """batch.tokens_per_microbatch as a number. `auto` is chosen by the memory plan of what trains here: the policy
    alone, on rows of one completion. Raises UserError where not even the longest row fits. A collective."""
    if config.batch.tokens_per_microbatch != "auto":
        return config.batch.tokens_per_microbatch
    alone: dict[str, object] = {
        "algorithm": AlgorithmConfig(),
        "batch.group_size": 1,
        "batch.prompts_per_step": settings_of(config).rows_per_step,
        "rollout.engine": "hf",
        "rollout.engine_args": {},
        "rollout.max_concurrent_sequences": 1,
        "rollout.device": "cpu",
        "rollout.weights_channel": "auto",
        "trainer.mode": "async",
    }
    settled = with_token_budget(changed(config, alone), device, ranks)
    check_plan(settled)
    check_room(settled, device, ranks.size)
    return settled.batch.microbatch_tokens


def _pack(demonstrations: Sequence[Demonstration]) -> bytes:
    """Rows as MessagePack for the other ranks, which need no data of their own. Images stay encoded."""
    packed = msgpack.packb(
        [[each.prompt.model_dump_json(), dict(each.blobs), list(each.target)] for each in demonstrations]
    )
    assert packed is not None
    return packed


def _unpack(data: bytes) -> list[Demonstration]:
    return [
        Demonstration(Prompt.model_validate_json(prompt), blobs, target)
        for prompt, blobs, target in msgpack.unpackb(data)
    ]


@contextmanager
def following(
    config: RunConfig, processor: PromptProcessor, ranks: Ranks, values: Mapping[str, Any]
) -> Generator[Obey, None, None]:
    """The trainer of another rank."""
    saved = Saved(Path(values["checkpoint"]), LearnerState(**values["state"])) if values["checkpoint"] else None
    trainer = SupervisedTrainer(config, processor, values["steps"], ranks, saved)

    def obey(command: RankCommand) -> None:
        calls: dict[str, Callable[[], object]] = {
            "learn": lambda: trainer.learn(command.values["step"], _unpack(ranks.broadcast(b""))),
            "held_out_nats": lambda: trainer.held_out_nats(_unpack(ranks.broadcast(b""))),
            "save": lambda: trainer.snapshot(command.values["step"], {}).write_files(Path(command.values["folder"])),
            **engine_calls(trainer.engine, processor, command),
        }
        calls[command.kind]()

    yield obey
