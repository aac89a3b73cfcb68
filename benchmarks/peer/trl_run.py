"""One run of TRL's GRPOTrainer with the settings of an asyncrl configuration, in an environment that has both.

    python -m benchmarks.peer.trl_run CONFIG --steps 20 --rows-at-once 64 --out record.json

It generates with transformers, in the process that trains, on learner.device: on a CPU on all cores that it may use.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import asyncrl.processing.torchvision_cpu  # noqa: F401 (before TRL imports torchvision)
from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import RewardFunctionConfig, component_name
from asyncrl.data.dataset import open_train
from asyncrl.errors import UserError
from asyncrl.journal.writer import TicketSlot
from asyncrl.processing.processor import PromptProcessor
from asyncrl.rewards.sample import RewardSample
from asyncrl.rewards.spec import call_reward, load_reward
from learner.tickets.ticket_writer import TicketWriter


def trl_settings(config: RunConfig, steps: int, rows_at_once: int, folder: str) -> dict[str, Any]:
    """Arguments of GRPOConfig: what `config` says, and nothing saved, reported or evaluated."""
    optim, algorithm, batch = config.learner.optim, config.algorithm, config.batch
    rows = batch.prompts_per_step * batch.group_size
    return {
        "output_dir": folder,
        "use_cpu": config.learner.device == "cpu",
        "bf16": config.model.dtype == "bfloat16",
        "model_init_kwargs": {"dtype": config.model.dtype},
        "gradient_checkpointing": bool(config.learner.gradient_checkpointing),
        "max_steps": steps,
        "num_generations": batch.group_size,
        "per_device_train_batch_size": min(rows_at_once, rows),
        "gradient_accumulation_steps": max(1, rows // rows_at_once),
        "shuffle_dataset": False,
        "max_completion_length": config.data.max_response_length,
        "temperature": config.rollout.temperature,
        "top_k": config.rollout.top_k,
        "top_p": config.rollout.top_p,
        "learning_rate": optim.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": optim.lr_warmup_steps,
        "optim": "adamw_torch",
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "weight_decay": optim.weight_decay,
        "max_grad_norm": optim.max_grad_norm,
        "loss_type": "dapo",  # the mean over all tokens of the batch: our token-mean
        "scale_rewards": "group" if algorithm.norm_adv_by_std else "none",
        "epsilon": algorithm.clip_ratio_low,
        "epsilon_high": algorithm.clip_ratio_high,
        "beta": algorithm.kl_loss_coef,
        "num_iterations": algorithm.updates_per_batch,
        "reward_weights": [function.weight for function in config.reward.functions],
        "seed": config.trainer.seed,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def read_rows(config: RunConfig) -> list[dict[str, Any]]:
    """The configuration's training rows as TRL takes them: a conversation, decoded images, and the other columns."""
    from PIL import Image

    data = config.data
    source = open_train(data)
    rows: list[dict[str, Any]] = []
    for row in (dict(source[index]) for index in range(len(source))):
        images = [Image.open(io.BytesIO(image)).convert("RGB") for image in row.pop(data.image_key, ())]
        question = row.pop(data.prompt_key)
        # Without images TRL takes the rows for text; an empty column of them would be an error there.
        pictures = {"images": images} if images else {}
        rows.append({"prompt": [{"role": "user", "content": question}], **pictures, **row})
    return rows


def reward_function(function: RewardFunctionConfig, answer_key: str) -> Callable[..., list[float]]:
    """The configuration's reward function, of many completions at once."""
    score = load_reward(function.function)

    def scores(completions: list[Any], **columns: Any) -> list[float]:
        found: list[float] = []
        for number, completion in enumerate(completions):
            row = {name: values[number] for name, values in columns.items() if isinstance(values, list)}
            sample = RewardSample(completion[0]["content"], answer=row.get(answer_key), columns=row)
            found.append(float(call_reward(score, [sample], function.kwargs)[0]))
        return found

    scores.__name__ = component_name(function)
    return scores


def check_prompts(config: RunConfig, trainer: Any, rows: list[dict[str, Any]]) -> None:
    """Compare the token ids of one step's prompts with those of our tickets: the same rows in the same order."""
    from trl.data_utils import prepare_multimodal_messages

    processor = PromptProcessor(config.model)
    writer = TicketWriter(config.ticket_settings, processor, processor.ends.stop_token_ids)
    for place, row in enumerate(rows[: config.batch.prompts_per_step]):
        ours = writer.write(TicketSlot(place, place, version=0, bound=0)).measured.token_ids.tolist()
        images = row.get("images")
        prompt = prepare_multimodal_messages(row["prompt"], images=images) if images else row["prompt"]
        (theirs,), *_ = trainer._tokenize_prompts([prompt])
        if ours != list(theirs):
            raise UserError(f"row {place} is another prompt in TRL: {list(theirs)}, and here {ours}")


def run(config: RunConfig, steps: int, rows_at_once: int) -> dict[str, Any]:
    """Train. Returns seconds, seconds of them in which completions are sampled and scored, mean reward and mean number
    of tokens of each step, and the peak of device memory."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends, sampling = [0.0], list[float]()

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends[0] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())
            took = ends[-1] - ends[-2]
            print(f"TRL's step {len(sampling)}: {took:.1f} s, {sampling[-1]:.1f} s of them sampling", flush=True)

    class TimedTrainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began = time.perf_counter()
            found = super()._generate_and_score_completions(inputs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            sampling.append(time.perf_counter() - began)
            return found

    rows = read_rows(config)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            model=config.model.path,
            args=GRPOConfig(**trl_settings(config, steps, rows_at_once, folder)),
            reward_funcs=[reward_function(function, config.data.answer_key) for function in config.reward.functions],
            train_dataset=Dataset.from_list(rows),
            callbacks=[Clock()],
        )
        check_prompts(config, trainer, rows)
        trainer.train()
    lines = [line for line in trainer.state.log_history if "reward" in line]
    return {
        "seconds": [after - before for before, after in pairwise(ends)],
        "sampling_seconds": sampling,
        "rewards": [line["reward"] for line in lines],
        "tokens": [line["completions/mean_length"] for line in lines],
        "peak_bytes": torch.cuda.max_memory_allocated() if config.learner.device != "cpu" else 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rows-at-once", type=int, required=True, help="completions in one forward and backward pass")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    record = run(load_config(arguments.config), arguments.steps, arguments.rows_at_once)
    arguments.out.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
