"""GRPO in one file: the algorithm that asyncrl runs asynchronously, here as one plain loop without a network.

1. rows        take the next prompts of a seeded permutation of the data
2. sample      let the policy write `group_size` completions of each prompt
3. reward      score each completion with a function
4. advantage   A = (reward - mean of its group) / standard deviation of its group
5. loss        for each token max(-A r, -A clip(r)), where r = p_now / p_before; then the mean over all tokens (PPO)
6. update      backward, clip the gradient, AdamW; then give the new weights to the engine that samples

Two models hold the weights: one samples with a key-value cache, one trains. Rounding makes their log-probs of a token
differ, so each token's loss is multiplied by p_before / p_sampled, at most 2.

    python recipes/grpo_in_one_file.py runs/demo-1/grpo/config.yaml run_dir=runs/page trainer.max_steps=5

runs on a CPU after `make demo`, and with any configuration that has the defaults of `algorithm`. `asyncrl train` at
staleness 0 makes the same weights, bit for bit (tests/system/test_recipe.py), and adds the rest of docs/design.md.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.data.dataset import open_train
from asyncrl.data.prompts import PromptRenderer, RenderedPrompt
from asyncrl.devices.device import resolve_dtype, set_up_training
from asyncrl.errors import UserError
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from asyncrl.rewards.sample import sample_of
from asyncrl.rewards.spec import load_reward
from learner.training.engine import TorchEngine
from learner.training.packing import MicroBatch, PackedTrajectory, TrainGroup, plan_micro_batches
from protocol.messages import FinishReason, Sampling
from rollout_server.engines.base import Completion, FailedRequest, GenerationRequest
from rollout_server.engines.hf.engine import HFEngine


@dataclass(frozen=True)
class Group:
    """A prompt (token ids, pixels) and completions of it: token ids, and the log-probs that they were sampled with."""

    prompt: EncodedPrompt
    completions: Sequence[Completion]
    rewards: Sequence[float]


class Run:
    def __init__(self, config: RunConfig):
        """Load data, rewards, and the model twice. Raises UserError for settings that this page does not know."""
        plain = AlgorithmConfig(updates_per_batch=config.algorithm.updates_per_batch)
        special = config.environment.is_used or any(part.group or part.shapes for part in config.reward.functions)
        if config.algorithm != plain or special or not config.trainer.max_steps:
            need = "trainer.max_steps, one turn, rewards of single completions and the defaults of `algorithm`"
            raise UserError(f"this page needs {need} (but updates_per_batch). Use `asyncrl train` for all else")
        set_up_training(config.learner, config.trainer)
        self.config = config = resolve_dtype(config)
        self.rows, self.renderer = open_train(config.data), PromptRenderer(config.data)
        self.rewards = [(part, load_reward(part.function)) for part in config.reward.functions]
        self.processor = PromptProcessor(config.model)
        self.engine = HFEngine(config, self.processor)
        updates = config.trainer.max_steps * config.algorithm.updates_per_batch
        self.trainer = TorchEngine(config.model_settings, config.learner.optim, updates)
        self.trainer.prepare()

    async def steps(self) -> AsyncIterator[tuple[list[Group], dict[str, float]]]:
        """Make `trainer.max_steps` steps, and yield the groups and the metrics of each."""
        await self.engine.start()
        per_step = self.config.batch.prompts_per_step
        for step in range(self.config.trainer.max_steps):
            groups = await self.sample(range(step * per_step, (step + 1) * per_step))
            metrics = self.update(groups)
            await self.engine.update_weights(step + 1, self.trainer.published_state())
            yield groups, metrics
        await self.engine.close()

    def row_at(self, position: int) -> RenderedPrompt:
        """The prompt at a position of the data order: each epoch is a permutation, made by the run's seed."""
        epoch, row = divmod(position, len(self.rows))
        if self.config.data.shuffle:
            seed = np.random.SeedSequence([self.config.trainer.seed, epoch])
            row = int(np.argsort(np.random.PCG64(seed).random_raw(len(self.rows)), kind="stable")[row])
        return self.renderer.render(self.rows[row], self.rows.row_id(row))

    async def sample(self, positions: Sequence[int]) -> list[Group]:
        """Sample a group at each position of the data order, and score it."""
        config = self.config
        sampling = Sampling(
            **{name: getattr(config.rollout, name) for name in ("temperature", "top_p", "top_k", "min_p")},
            max_new_tokens=config.data.max_response_length,
            stop_token_ids=self.processor.ends.stop_token_ids,
            banned_token_ids=self.processor.placeholder_ids,  # a sampled image token would have no image
        )
        rows = {position: self.row_at(position) for position in positions}
        requests: list[GenerationRequest] = []
        for position, row in rows.items():
            prompt = self.processor.encode(row.prompt, row.blobs)
            if len(prompt.token_ids) > config.data.max_prompt_length:
                raise UserError(f"row {prompt.row_id}: the prompt is over data.max_prompt_length. Leave the row out")
            # This seed, the completion's index and the token's place draw a token: no order of work changes it.
            seed = np.random.SeedSequence((config.trainer.seed, position)).generate_state(1, np.uint64)[0] >> 1
            requests.append(GenerationRequest(position, prompt, config.batch.group_size, int(seed), sampling))
        sampled: dict[tuple[int, int], Completion] = {}
        async for item in self.engine.generate(requests):
            if isinstance(item, FailedRequest):
                raise item.error
            sampled[item.request_id, item.index] = item
        groups: list[Group] = []
        for request in requests:
            completions = [sampled[request.request_id, index] for index in range(config.batch.group_size)]
            rewards = [self.reward(rows[request.request_id], completion) for completion in completions]
            groups.append(Group(request.encoded_prompt(0), completions, rewards))
        return groups

    def reward(self, row: RenderedPrompt, completion: Completion) -> float:
        """The weighted sum of the reward functions."""
        ids, text = completion.token_ids, self.processor.decode(completion.token_ids)
        limit = self.config.data.max_response_length
        ending = "length" if completion.finish_reason is FinishReason.LENGTH else "stop"
        shown = sample_of(row.prompt, text, row.blobs, ending, num_tokens=len(ids), max_tokens=limit)
        return sum(part.weight * float(function(shown, **part.kwargs)) for part, function in self.rewards)

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """Make `updates_per_batch` optimiser steps. `B` are all completions, `T` all their tokens."""
        completions = [completion for group in groups for completion in group.completions]
        start = torch.tensor([0, *(len(completion.token_ids) for completion in completions)]).cumsum(0)  # [B + 1]
        sampled = torch.from_numpy(np.concatenate([completion.logprobs for completion in completions]))  # [T]
        advantage = torch.cat([advantages(group.rewards) for group in groups])  # [B]
        before = torch.empty_like(sampled)  # [T] log-probs of the policy before the first update
        size, per_update = self.config.batch.group_size, len(groups) // self.config.algorithm.updates_per_batch
        packed: list[TrainGroup] = []
        for number, group in enumerate(groups):  # each token of each completion is trained
            rows = [(number * size + c.index, c.token_ids) for c in group.completions]
            packed.append(TrainGroup(group.prompt, tuple(PackedTrajectory(row, ids, ids >= 0) for row, ids in rows)))
        with torch.no_grad():
            for batch in self.micro_batches(packed):
                before[start[batch.row] + batch.column] = self.trainer.forward(batch).logprobs.cpu()
        metrics: dict[str, list[float]] = {"loss": [], "grad_norm": []}
        for first in range(0, len(packed), per_update):
            part = packed[first : first + per_update]
            num_tokens = sum(len(completion.token_ids) for group in part for completion in group.completions)
            metrics["loss"].append(0.0)
            for batch in self.micro_batches(part):
                now = self.trainer.forward(batch).logprobs  # [n] with gradient
                place = start[batch.row] + batch.column
                known = [column.to(now.device) for column in (before[place], sampled[place], advantage[batch.row])]
                loss = (token_losses(now, *known, algorithm=self.config.algorithm) * (1 / num_tokens)).sum()
                self.trainer.backward(loss)
                metrics["loss"][-1] += float(loss.detach())
            metrics["grad_norm"].append(self.trainer.optimizer_step()["grad_norm"])
        return {name: float(np.mean(values)) for name, values in metrics.items()}

    def micro_batches(self, packed: Sequence[TrainGroup]) -> Iterator[MicroBatch]:
        """One at a time, within the budget of tokens: each prompt once, then its completions."""
        tokens = self.trainer.tokens_at_once(self.config.batch.microbatch_tokens)
        return map(self.trainer.pack, plan_micro_batches(packed, tokens))


def advantages(rewards: Sequence[float]) -> torch.Tensor:
    """[group_size]: 0 where all rewards are equal, as nothing can be learned from them."""
    scores = torch.tensor(rewards, dtype=torch.float32).double()
    if len(rewards) < 2 or scores.std() < 1e-6:
        return torch.zeros(len(rewards))
    return (scores - scores.mean()).float() / (scores.std().float() + 1e-6)


def token_losses(
    now: torch.Tensor, before: torch.Tensor, sampled: torch.Tensor, advantage: torch.Tensor, algorithm: AlgorithmConfig
) -> torch.Tensor:
    """[n] PPO's clipped loss of each token. `now`, `before`, `sampled`: its log-probs."""
    ratio = (now - before).exp()
    clipped = ratio.clamp(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * algorithm.clip_ratio_c), loss)
    return (before - sampled).exp().clamp_max(2.0) * loss


async def main(run: Run) -> None:
    async for groups, metrics in run.steps():
        print({"reward": float(np.mean([group.rewards for group in groups])), **metrics})
    run.trainer.export(run.processor.processor, Path(run.config.run_dir) / "export")


if __name__ == "__main__":
    if len(sys.argv) < 2 or {"-h", "--help"} & set(sys.argv):
        sys.exit(print(__doc__))
    try:
        asyncio.run(main(Run(load_config(Path(sys.argv[1]), sys.argv[2:]))))
    except UserError as error:
        sys.exit(f"error: {error}")
