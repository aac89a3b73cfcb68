"""Supervised warm start: `python -m asyncrl_plugins.sft.run --config CONFIG [key=value ...]`.

The same rows, prompts, packing, engines and ranks as reinforcement learning; the loss is the mean negative
log-likelihood of `data.target_key` per token of the whole step. The model is exported to `<run_dir>/export`.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack
import numpy as np
import torch

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig, changed
from asyncrl.data.dataset import open_train
from asyncrl.data.prompt_sources import DataOrder
from asyncrl.data.prompts import RenderedPrompt
from asyncrl.data.survey.row_survey import PromptRows
from asyncrl.devices.device import set_up_training
from asyncrl.errors import BadStateError, UserError
from asyncrl.memory_plan.plan import check_plan
from asyncrl.models.export import check_export
from asyncrl.processing.processor import PromptProcessor, prompt_processor
from asyncrl.run_folder.contents import EXPORT_FOLDER, save_config
from asyncrl.run_folder.lock import LearnerLock
from asyncrl.service_entry import StartMode, run_service
from asyncrl.telemetry.recorder import RunRecorder
from asyncrl.telemetry.tracker import TrackedRun, open_trackers
from learner.loop.follower import Obey, engine_calls, follow
from learner.loop.policy_export import ROWS, finish_export
from learner.loop.resume import refuse_taken, settle_day
from learner.loop.trainer import check_room, with_token_budget
from learner.ranks.commands import RankCommand
from learner.ranks.group import ALONE, Ranks
from learner.ranks.processes import Leader, leading, telling_given_ranks
from learner.ranks.rank_variables import rank_of_service, rank_variables, with_given_ranks
from learner.training.engine import TorchEngine
from learner.training.packing import PackedTrajectory, TrainGroup
from learner.training.roles import Roles
from learner.training.token_budget import TokenBudget
from protocol.messages import Prompt

logger = logging.getLogger(__name__)

SERVICE = "asyncrl_plugins.sft.run"
CACHE_MIB = 1024
"""Room for encoded prompts: rows come back every epoch."""
REPORTS = 20
"""Progress lines of a run."""


@dataclass(frozen=True)
class Demonstration:
    """A row: its prompt, and the answer that is to be learnt."""

    prompt: Prompt
    blobs: Mapping[str, bytes]
    """Encoded images and frames by content hash."""
    target: Sequence[int]
    """Token ids, the end of the turn included."""


class SupervisedTrainer:
    """Engine and steps of a supervised run. Of several ranks each has one, which makes every step."""

    def __init__(self, config: RunConfig, processor: PromptProcessor, num_steps: int, ranks: Ranks = ALONE):
        self.config, self.processor, self.ranks = config, processor, ranks
        self.engine = TorchEngine(config.model_settings, config.sft.optim, num_steps, ranks)
        tokens = choose_tokens(config, self.engine.device, ranks)
        self.engine.prepare()
        if ranks.leads:
            check_export(self.engine.model, processor.processor)
        self.roles = Roles(self.engine, ranks=ranks)
        self.features = self.roles.share_features(config.learner)
        self.budget = TokenBudget(self.roles, tokens)

    def learn(self, step: int, demonstrations: Sequence[Demonstration]) -> dict[str, float]:
        """One optimiser step on the mean negative log-likelihood per target token, on all ranks."""
        self.ranks.announce("learn", lambda: _pack(demonstrations), step=step)
        groups = [self._group(row, each) for row, each in enumerate(demonstrations)]
        targets = sum(len(each.target) for each in demonstrations)
        loss = self.budget.run(partial(self._accumulate, groups, targets), groups, f"step {step}")
        if not math.isfinite(loss):
            raise BadStateError(f"the loss is {loss}: lower sft.optim.lr ({self.config.sft.optim.lr})")
        updated = self.budget.update(self.engine.optimizer_step, f"step {step}")
        reused = self.features.report(self.ranks.total) if self.features else {}
        work = self.roles.work.report(self.ranks, self.engine.device)
        return {"loss": loss, "tokens": float(targets), **reused, **updated, **self.budget.report(), **work}

    def _accumulate(self, groups: Sequence[TrainGroup], targets: int, tokens_per_microbatch: int) -> float:
        """Add up the gradients of a step over its micro-batches. Returns the loss."""
        total = 0.0
        for micro_batch in self.roles.micro_batches(groups, tokens_per_microbatch):
            loss = -self.engine.forward(micro_batch).logprobs.sum() / targets * (not micro_batch.is_idle)
            self.engine.backward(loss)
            total += float(loss.detach())
        return self.ranks.total(total)

    def _group(self, row: int, shown: Demonstration) -> TrainGroup:
        """The prompt with its one completion; several ranks compute the pixels of their shares alone."""
        encode = partial(self.processor.encode, shown.prompt, shown.blobs)
        ids = np.asarray(shown.target, np.int32)
        completion = PackedTrajectory(row, ids, np.ones(len(ids), np.uint8))
        if self.ranks.size == 1:
            return TrainGroup(encode(), (completion,))
        measured = self.processor.measure(shown.prompt, shown.blobs)
        return TrainGroup(measured, (completion,), encode)


def choose_tokens(config: RunConfig, device: torch.device, ranks: Ranks) -> int:
    """batch.tokens_per_microbatch as a number. `auto` is chosen by the memory plan of what trains here: the policy
    alone, on rows of one completion. Raises UserError where not even the longest row fits. A collective."""
    if config.batch.tokens_per_microbatch != "auto":
        return config.batch.tokens_per_microbatch
    alone: dict[str, object] = {
        "algorithm": AlgorithmConfig(),
        "batch.group_size": 1,
        "batch.prompts_per_step": config.sft.rows_per_step,
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


class SupervisedRun:
    """A supervised run on rank 0: rows, trainer and recorder, and one optimiser step after the other."""

    def __init__(self, config: RunConfig, leader: Leader | None = None):
        self.processor = prompt_processor(
            config.model, config.environment, config.data.chat_template_kwargs, cache_mib=CACHE_MIB
        )
        self.config = config = changed(config, settle_day(config.model, self.processor))
        self.rows = PromptRows(
            open_train(config.data, "sft"),
            config.data,
            self.processor,
            config.network.max_message_mib,
            check=self._target_ids,
        )
        survey = self.rows.usable()
        bad_rows = [vars(row) for row in survey.bad]
        self.usable = survey.usable
        self.order = DataOrder(len(self.usable), config.trainer.seed, config.data.shuffle)
        self.steps = config.sft.steps or math.ceil(len(self.usable) / config.sft.rows_per_step)
        ranks = leader.begin(steps=self.steps, template_date=config.model.template_date) if leader else ALONE
        self.trainer = SupervisedTrainer(config, self.processor, self.steps, ranks)
        self.recorder = RunRecorder(
            config.run_path,
            open_trackers(config.telemetry, TrackedRun(config.run_path, config.model_dump(mode="json")), Counter()),
        )
        self.recorder.bad_rows(bad_rows)

    def run(self) -> None:
        started = time.monotonic()
        for step in range(1, self.steps + 1):
            first = (step - 1) * self.config.sft.rows_per_step
            positions = range(first, first + self.config.sft.rows_per_step)
            indices = [self.usable[self.order.row_at(position)] for position in positions]
            values = self.trainer.learn(step, [self._demonstration(index) for index in indices])
            self.recorder.step({"step": step, "time": time.time(), **values})
            if step % max(1, self.steps // REPORTS) == 0 or step == self.steps:
                rate = (time.monotonic() - started) / step
                logger.info("step %d of %d: loss %.4f, %.2f s per step", step, self.steps, values["loss"], rate)
        folder = self.config.run_path / EXPORT_FOLDER
        self.trainer.engine.export(self.processor.processor, folder)
        record = finish_export(self.config.model, "", self.processor, self._some_prompts, folder)
        logger.log(logging.WARNING if record.differs else logging.INFO, "finished: %s is %s", folder, record.describe())

    def _some_prompts(self) -> list[RenderedPrompt]:
        return [self.rows.render(index) for index in self.usable[:ROWS]]

    def _demonstration(self, index: int) -> Demonstration:
        rendered = self.rows.render(index)
        return Demonstration(rendered.prompt, rendered.blobs, self._target_ids(rendered))

    def _target_ids(self, rendered: RenderedPrompt) -> list[int]:
        """Token ids of the demonstration. Raises UserError where there is none, or it is too long."""
        data, row_id = self.config.data, rendered.prompt.row_id
        if not rendered.target:
            raise UserError(f"row {row_id}: column {data.target_key!r} (data.target_key) must be a non-empty string")
        ids = self.processor.tokenize_completion(rendered.target)
        if len(ids) > data.max_response_length:
            raise UserError(
                f"row {row_id}: the target has {len(ids)} tokens, over data.max_response_length = "
                f"{data.max_response_length}. Raise it or shorten the target"
            )
        return ids


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
def _following(
    config: RunConfig, processor: PromptProcessor, ranks: Ranks, values: Mapping[str, Any]
) -> Generator[Obey, None, None]:
    """The trainer of another rank."""
    trainer = SupervisedTrainer(config, processor, values["steps"], ranks)

    def obey(command: RankCommand) -> None:
        calls: dict[str, Callable[[], object]] = {
            "learn": lambda: trainer.learn(command.values["step"], _unpack(ranks.broadcast(b""))),
            **engine_calls(trainer.engine, processor, command),
        }
        calls[command.kind]()

    yield obey


def main(config: RunConfig, start: StartMode) -> None:
    config = with_given_ranks(config)
    set_up_training(config.learner, config.trainer)
    if rank_of_service() > 0:
        follow(config, _following)
        return
    if start.resume:
        raise UserError("asyncrl sft cannot resume; start it again in another run_dir")
    environment = rank_variables(config.learner, config.trainer.mode)
    with ExitStack() as resources:
        given = resources.enter_context(telling_given_ranks(environment, config.learner.wait_timeout_s))
        held = resources.enter_context(LearnerLock(config.run_path, SERVICE))
        refuse_taken(config.run_path)
        divided = config.learner.is_divided
        leader = (
            resources.enter_context(leading(config.learner, config.network, environment, given, SERVICE))
            if divided
            else None
        )
        run = SupervisedRun(config, leader)
        held.accept()
        save_config(config.run_path, dump_config(run.config))
        resources.callback(run.recorder.close)
        run.run()


if __name__ == "__main__":
    rank = rank_of_service()
    run_service(f"{SERVICE}-rank{rank}" if rank else SERVICE, main)
