"""A sync cycle step by step, on any device: the engine samples and sleeps, the learner trains and sleeps, and again.

Both halves live in this process (vLLM brings its own processes), so what torch counts here is whoever is awake.
"""

from __future__ import annotations

import io
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from asyncrl.config.schema import RunConfig
from asyncrl.data.images import content_hash
from asyncrl.devices.device import resolve_dtype
from asyncrl.memory_plan import GIB
from asyncrl.memory_plan.plan import MemoryPlan, make_plan
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from learner.network.publication import open_publication, publish
from learner.training.engine import TorchEngine
from learner.training.packing import PackedTrajectory, TrainGroup, build_micro_batch, plan_micro_batches
from protocol.messages import ChatMessage, ImagePart, Prompt, Sampling, TextPart
from rollout_server.engines import create_engine
from rollout_server.engines.base import Completion, GenerationRequest, InferenceEngine
from rollout_server.weights.receiver import WeightReceiver

QUESTION = "What is the sum of the digits?"
TINY: dict[str, Any] = {
    "images": 2,
    "pixels": 28,
    "prompts": 2,
    "data": {"max_prompt_length": 64, "max_response_length": 8},
    "batch": {"prompts_per_step": 2, "group_size": 2, "tokens_per_microbatch": 256},
    "rollout": {"max_concurrent_sequences": 4},
}
FULL: dict[str, Any] = {
    "images": 3,
    "pixels": 224,
    "prompts": 4,
    "data": {"max_prompt_length": 1024, "max_response_length": 256},
    "batch": {"prompts_per_step": 4, "group_size": 4, "tokens_per_microbatch": 2048},
    "rollout": {"max_concurrent_sequences": 16},
}
WHOLE: dict[str, Any] = {
    **FULL,
    "prompts": 16,
    "batch": {"prompts_per_step": 16, "group_size": 8, "tokens_per_microbatch": 16384},
    "rollout": {"max_concurrent_sequences": 128},
}
"""Settings of the benchmark's prompts and of `cycle_config`; `WHOLE` is a step of a size that people train with."""


@dataclass(frozen=True)
class Step:
    """One step of the cycle, measured."""

    name: str
    seconds: float
    peak: int
    """Most bytes of torch's tensors on the device in this process; 0 on a CPU."""
    left: int
    """Bytes on the device afterwards, other processes included; 0 on a CPU."""
    moved: int = 0
    """Bytes that went over the link."""
    planned: int = 0
    """Planned value of `peak`; 0 without one."""


@dataclass
class Cycle:
    plan: MemoryPlan
    steps: list[Step] = field(default_factory=list)
    published: int = 0
    """Bytes of the version that the learner published."""
    sampled: int = 0
    """Tokens of one round's completions."""
    packed: int = 0
    """Tokens of one round's packed groups: each prompt once."""
    flops: float = 0.0
    """Useful training work of one round (learner/training/engine_facts.py)."""
    differences: list[np.ndarray] = field(default_factory=list)
    """[N] |engine's - learner's log-prob| of the sampled tokens, for each time the learner trained."""

    def step(self, name: str) -> Step:
        return next(step for step in self.steps if step.name == name)


def cycle_config(model_folder: Path, folder: Path, shape: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    base: dict[str, dict[str, Any]] = {
        "model": {"path": str(model_folder)},
        "data": {"train_files": ["made-here.jsonl"], **shape["data"]},
        "batch": shape["batch"],
        "rollout": shape["rollout"],
        "reward": {"functions": [{"function": "exact_match"}]},
        "trainer": {"mode": "sync"},
        "learner": {"max_staleness": 0, "optim": {"lr": 1e-3}},  # so large that old weights would show
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values}
    return resolve_dtype(RunConfig.model_validate({"run_dir": str(folder / "run"), **base}))


async def run_cycle(config: RunConfig, shape: dict[str, Any]) -> Cycle:
    """Two rounds: the second one is after everybody has slept."""
    meter = _Meter(torch.device(config.learner.device))
    processor = PromptProcessor(config.model)
    prompts = make_prompts(processor, shape)
    cycle = Cycle(make_plan(config))
    learner = TorchEngine(config.model_settings, config.learner.optim, total_updates=10)
    publication = open_publication("gpu-cycle")
    engine = create_engine(config, processor)
    receiver = WeightReceiver(config.model.path, config.network, config.first_meeting_s, engine, "shm", "")
    planned = {phase.name: _tensors_of(cycle.plan, phase.name) for phase in cycle.plan.phases}
    weights = cycle.plan.model.weights
    model = cycle.plan.model
    learning = model.weights if config.learner.offloads_masters else model.kept
    try:
        async with meter.step(cycle, "engine starts"):
            await engine.start()
        async with meter.step(cycle, "engine samples", planned=planned["engine awake"]):
            completions = await sample(engine, prompts, config)
        async with meter.step(cycle, "engine sleeps", moved=weights):
            await engine.sleep()
        async with meter.step(cycle, "learner starts"):
            learner.prepare()
        async with meter.step(cycle, "learner trains", planned=planned["learner awake"]):
            cycle.differences.append(train(learner, prompts, completions, config))
        groups = train_groups(prompts, completions)
        cycle.sampled = sum(len(c.token_ids) for group in completions for c in group)
        cycle.packed = sum(group.num_tokens for group in groups)
        cycle.flops = learner.facts.flops.of(groups)
        async with meter.step(cycle, "learner publishes"):
            manifest = publish(publication, learner, 1)
        cycle.published = sum(entry.nbytes for entry in manifest.tensors)
        async with meter.step(cycle, "learner sleeps", moved=learning):
            learner.sleep()
        async with meter.step(cycle, "engine wakes", moved=weights):
            await engine.wake()
        async with meter.step(cycle, "engine takes new weights", moved=manifest.total_bytes):
            await receiver.load(manifest)
        async with meter.step(cycle, "engine samples again", planned=planned["engine awake"]):
            completions = await sample(engine, prompts, config)
        async with meter.step(cycle, "engine sleeps again", moved=weights):
            await engine.sleep()
        async with meter.step(cycle, "learner wakes", moved=learning):
            learner.wake()
        async with meter.step(cycle, "learner trains again", planned=planned["learner awake"]):
            cycle.differences.append(train(learner, prompts, completions, config))
    finally:
        receiver.close()
        await engine.close()
        publication.close()
    return cycle


def _tensors_of(plan: MemoryPlan, name: str) -> int:
    """Bytes of tensors, without contexts, CUDA graphs, and gaps between tensors, which torch does not count."""
    (phase,) = (phase for phase in plan.phases if phase.name == name)
    return sum(line.nbytes for line in phase.lines if not line.name.startswith(("context", "CUDA graphs", "allocator")))


# --- work ----------------------------------------------------------------------------------------


def make_prompts(processor: PromptProcessor, shape: dict[str, Any]) -> list[EncodedPrompt]:
    """Different random images in each."""
    random = np.random.default_rng(0)
    prompts: list[EncodedPrompt] = []
    for number in range(shape["prompts"]):
        images = [_png(random, shape["pixels"]) for _ in range(shape["images"])]
        parts = [*(ImagePart() for _ in images), TextPart(text=QUESTION)]
        message = ChatMessage(role="user", content=tuple(parts))
        hashes = tuple(content_hash(image) for image in images)
        prompt = Prompt(row_id=f"row {number}", messages=(message,), image_hashes=hashes, answer="", columns={})
        prompts.append(processor.encode(prompt, dict(zip(hashes, images, strict=True))))
    return prompts


def _png(random: np.random.Generator, side: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(random.integers(0, 255, (side, side, 3), np.uint8)).save(buffer, format="PNG")
    return buffer.getvalue()


async def sample(
    engine: InferenceEngine, prompts: Sequence[EncodedPrompt], config: RunConfig
) -> list[list[Completion]]:
    """A group for each prompt; without stop tokens, so that every completion has the greatest length."""
    banned = PromptProcessor(config.model).placeholder_ids
    sampling = Sampling(
        temperature=config.rollout.temperature,
        max_new_tokens=config.data.max_response_length,
        stop_token_ids=(),
        banned_token_ids=banned,
    )
    size = config.batch.group_size
    requests = [GenerationRequest(i, prompt, size, i, sampling) for i, prompt in enumerate(prompts)]
    groups: list[list[Completion]] = [[] for _ in prompts]
    async for completion in engine.generate(requests):
        groups[completion.request_id].append(completion)
    return [sorted(group, key=lambda completion: completion.index) for group in groups]


def train_groups(prompts: Sequence[EncodedPrompt], groups: Sequence[Sequence[Completion]]) -> list[TrainGroup]:
    """Groups to train on, rows in their order."""
    numbers = iter(range(sum(map(len, groups))))
    return [
        TrainGroup(
            prompt,
            tuple(PackedTrajectory(next(numbers), c.token_ids, np.ones(len(c.token_ids), np.int32)) for c in group),
        )
        for prompt, group in zip(prompts, groups, strict=True)
    ]


def train(
    learner: TorchEngine, prompts: Sequence[EncodedPrompt], groups: Sequence[Sequence[Completion]], config: RunConfig
) -> np.ndarray:
    """One update that raises the log-prob of every sampled token. [N] |engine's - learner's log-prob| before it."""
    rows = [completion for group in groups for completion in group]
    differences: list[np.ndarray] = []
    for part in plan_micro_batches(train_groups(prompts, groups), config.batch.microbatch_tokens):
        micro_batch = build_micro_batch(learner.unwrap_model(), part, learner.device)
        outputs = learner.forward(micro_batch)
        learner.backward(-outputs.logprobs.mean())
        theirs = [
            rows[r].logprobs[c] for r, c in zip(micro_batch.row.tolist(), micro_batch.column.tolist(), strict=True)
        ]
        differences.append(np.abs(outputs.logprobs.detach().float().cpu().numpy() - np.asarray(theirs)))
    learner.optimizer_step()
    return np.concatenate(differences)


# --- measuring -----------------------------------------------------------------------------------


class _Meter:
    def __init__(self, device: torch.device):
        self._device = device
        self._cuda = device.type == "cuda"

    @asynccontextmanager
    async def step(self, cycle: Cycle, name: str, *, moved: int = 0, planned: int = 0) -> AsyncIterator[None]:
        if self._cuda:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        started = time.perf_counter()
        yield
        peak = left = 0
        if self._cuda:
            torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
            free, total = torch.cuda.mem_get_info(self._device)
            left = total - free
        cycle.steps.append(Step(name, time.perf_counter() - started, peak, left, moved, planned))


def link_bytes_per_second(device: torch.device, nbytes: int = GIB) -> tuple[float, float]:
    """Off the device and onto it: the best of three copies of pinned memory."""
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return _best_copy(there, pinned, device), _best_copy(pinned, there, device)


def _best_copy(source: torch.Tensor, target: torch.Tensor, device: torch.device) -> float:
    seconds: list[float] = []
    for _ in range(3):
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return source.nbytes / min(seconds)
