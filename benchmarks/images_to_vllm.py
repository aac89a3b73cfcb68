"""Bytes of a group's image on its way to vLLM's core, and their processor time: sent with each completion, and once.

    python -m benchmarks.images_to_vllm [--side 1024] [--size 8] [--rounds 5]

Two engines on the CPU with a random Qwen2.5-VL of patches of 14 sample one token per completion, in turn: one whose
core keeps nothing (`rollout.engine_args.mm_processor_cache_gb=0`), and one as it is started by default. Each round has
a new image. CPU time is of this process and of the core, from a group's first request to its last completion: the work
of both engines is the same but for the pixels.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from asyncrl.config.schema import RunConfig
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.vllm.engine import VLLMEngine
from benchmarks.prompt_measuring import prompts
from protocol.messages import Sampling
from rollout_server.engines.base import FailedRequest, GenerationRequest
from tests.rigs.tiny_families import make_family

ARMS = {"sent with each completion": {"mm_processor_cache_gb": 0}, "sent once": {}}


@dataclass
class Traffic:
    """Requests of a group on their way to the core."""

    nbytes: int = 0
    cpu: float = 0.0
    """Processor seconds of both processes when the first request was sent."""


@dataclass
class Arm:
    """An engine, and what was measured of each of its groups."""

    engine: VLLMEngine
    processes: list[psutil.Process]
    now: Traffic = field(default_factory=Traffic)
    rows: list[tuple[int, float]] = field(default_factory=list)
    """Bytes and processor seconds."""

    def cpu(self) -> float:
        times = [process.cpu_times() for process in self.processes]
        return sum(one.user + one.system for one in times)

    def watch(self) -> None:
        """Count what goes to the core from here on."""
        from vllm.v1.engine import EngineCoreRequestType  # pyright: ignore[reportMissingImports]

        core = self.engine._llm.engine_core
        send = core._send_input_message

        def counted(message: tuple[Any, ...], identity: bytes) -> Any:
            if message[0] == EngineCoreRequestType.ADD.value:
                self.now.cpu = self.now.cpu or self.cpu()
                self.now.nbytes += sum(memoryview(part).nbytes for part in message)
            return send(message, identity)

        core._send_input_message = counted

    async def sample(self, request: GenerationRequest, *, counts: bool) -> None:
        self.now = Traffic()
        async for done in self.engine.generate([request]):
            if isinstance(done, FailedRequest):
                raise done.error
        if counts:
            self.rows.append((self.now.nbytes, self.cpu() - self.now.cpu))


def engine_config(model: Path, folder: Path, side: int, engine_args: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": str(folder / "run"),
            "model": {"path": str(model), "dtype": "float32", "max_pixels": (side + 28) ** 2},
            "data": {"train_files": ["made-here.jsonl"], "max_prompt_length": 2000, "max_response_length": 8},
            "learner": {"device": "cpu"},
            "rollout": {
                "engine": "vllm",
                "device": "cpu",
                "max_concurrent_sequences": 8,
                "engine_args": engine_args,
            },
            "reward": {"functions": [{"function": "exact_match"}]},
        }
    )


async def started(config: RunConfig) -> Arm:
    mine = psutil.Process()
    before = set(mine.children(recursive=True))
    engine = VLLMEngine(config, PromptProcessor(config.model))
    await engine.start()
    arm = Arm(engine, [mine, *(set(mine.children(recursive=True)) - before)])
    arm.watch()
    return arm


async def measure(folder: Path, side: int, size: int, rounds: int) -> None:
    model = make_family("qwen2_5_vl", folder / "model", patch=14)
    arms = {name: await started(engine_config(model, folder, side, given)) for name, given in ARMS.items()}
    processor = PromptProcessor(engine_config(model, folder, side, {}).model)
    sampling = Sampling(
        temperature=1.0, max_new_tokens=1, stop_token_ids=(), banned_token_ids=processor.placeholder_ids
    )
    for number, (prompt, blobs) in enumerate(prompts(side, rounds + 1)):
        request = GenerationRequest(number, processor.encode(prompt, blobs), size, number, sampling)
        for arm in arms.values():
            await arm.sample(request, counts=number > 0)
    print("| image of a group | to the core, MB | CPU of both processes, s |\n|---|---|---|")
    for name, arm in arms.items():
        nbytes, cpu = (median(column) for column in zip(*arm.rows, strict=True))
        print(f"| {name} | {nbytes / 1e6:.1f} | {cpu:.2f} |")
        await arm.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=1024, help="pixels; up to 1,200")
    parser.add_argument("--size", type=int, default=8, help="completions of a group")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), arguments.side, arguments.size, arguments.rounds))


if __name__ == "__main__":
    main()
