"""The run directory: is it free and writable, and has its disk room for what the run will write?"""

from __future__ import annotations

import resource
import shutil
import tempfile
from pathlib import Path

from asyncrl.config.schema import RunConfig
from asyncrl.errors import RunTakenError, UserError
from asyncrl.launch.processes import LOG_BYTES
from asyncrl.memory_plan import GIB, size
from asyncrl.memory_plan.plan import MemoryPlan
from asyncrl.run_folder.contents import check_run_dir, is_resumable
from asyncrl.run_folder.lock import refuse_busy
from asyncrl_plugins.doctor.findings import Finding, Findings, split_fix

MIB = 2**20
HEADER_BYTES = 200
"""Bytes of a trajectory in the journal, beside its arrays."""
INDEX_SHARE, INDEX_ROW_BYTES = 0.3, 200
"""Size of samples.sqlite: share of the groups that it lists (docs/lab-log/tools.md), and bytes per trajectory."""
SAMPLE_BYTES, TEXT_BYTES, ID_BYTES = 500, 6, 8
"""Bytes in samples.jsonl of a trajectory beside its tokens, of a token's text, and of a completion token's id."""
STEP_BYTES = 8192
"""Bytes of a step in metrics.jsonl and timeline.jsonl."""


def find_run_dir(config: RunConfig) -> Findings[None]:
    path = config.run_path
    folder = nearest_folder(path)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b" ")
            file.flush()
        refuse_busy(path)
        check_run_dir(config.run_path, resume=False)
        yield Finding("run_dir", f"{path} is free, and {folder} can be written")
    except OSError as error:
        value = f"nothing can be written in {folder}: {error.strerror}"
        yield Finding("run_dir", value, "problem", "set run_dir to a folder that you may write, on a disk with room")
    except UserError as error:
        value, fix = split_fix(str(error).removeprefix("run_dir "))
        continues = is_resumable(path) and not isinstance(error, RunTakenError)
        yield Finding("run_dir", value, "warning" if continues else "problem", fix)


def nearest_folder(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


def find_disk(config: RunConfig, plan: MemoryPlan, num_rows: int | None) -> Findings[None]:
    """`num_rows` of training: None where they cannot be read. A checkpoint that a crash adds is not counted."""
    folder = nearest_folder(config.run_path)
    free = shutil.disk_usage(folder).free
    if num_rows is None and not config.trainer.max_steps:
        value = f"{size(free)} free in {folder}; how much the run writes is not known without its training rows"
        yield Finding("disk of run_dir", value, "note")
        return
    parts = _written_parts(config, plan, config.total_steps(num_rows or 0))
    needed = sum(nbytes for _, nbytes, _ in parts)
    # A run that is to be continued has some of it already; its images are not counted in `needed` either.
    files = (file for file in config.run_path.rglob("*") if file.is_file() and file.parent.name != "images")
    written = sum(file.stat().st_size for file in files)
    already = f", {size(written)} written already" if written else ""
    listed = ", ".join(text for text, _, _ in parts)
    value = f"{size(free)} free in {folder}{already}; the run writes up to {size(needed)}: {listed}; and images"
    if free + written < needed:
        settings = [setting for _, nbytes, setting in parts if setting and nbytes > 0.1 * needed]
        lower = f", or lower {' and '.join(settings)}" if settings else ""
        yield Finding("disk of run_dir", value, "problem", f"make room, set run_dir on a larger disk{lower}")
    else:
        yield Finding("disk of run_dir", value)
    limit, largest = (
        resource.getrlimit(resource.RLIMIT_FSIZE)[0],
        max(_optimiser_state(plan), _saved_weights(config, plan)),
    )
    if limit != resource.RLIM_INFINITY and limit < largest:
        value = f"this process may write files of {size(limit)}, and a checkpoint has one of {size(largest)}"
        yield Finding("file sizes", value, "problem", "raise the limit: ulimit -f unlimited")


def _written_parts(config: RunConfig, plan: MemoryPlan, steps: int) -> list[tuple[str, int, str]]:
    """Text, bytes, and the setting that makes it smaller, of the large files that a whole run writes."""
    trainer, model = config.trainer, plan.model
    trajectories = steps * config.trajectories_per_step
    arrays = steps * config.batch.prompts_per_step * config.group_bytes(config.trajectories_per_group)
    groups = arrays + trajectories * HEADER_BYTES
    waiting, kept = trainer.journal_limit_mib * MIB, int(trainer.keep_samples_gib * GIB)
    critic = model.critic.kept if model.critic else 0
    moving = model.reference if config.reference.moves else 0
    weights = _saved_weights(config, plan)
    checkpoint = weights + _optimiser_state(plan) + critic + moving
    saves = 1 + groups // waiting + ((steps - 1) // trainer.save_freq if trainer.save_freq else 0)
    number = min(trainer.save_limit + 1, saves)  # the new one is whole before the oldest goes
    journal = min(groups, waiting + kept)
    to_shorten = "trainer.keep_samples_gib" if kept > waiting else "trainer.journal_limit_mib"
    index = int(INDEX_SHARE * arrays) + trajectories * INDEX_ROW_BYTES
    completion = SAMPLE_BYTES + (TEXT_BYTES + ID_BYTES) * config.data.max_response_length
    shown = steps * min(trainer.samples_per_step, config.batch.prompts_per_step)
    samples = shown * (TEXT_BYTES * config.data.max_prompt_length + config.trajectories_per_group * completion)
    beside = _beside_model(config, plan)
    logs = (1 + config.rollout.servers) * 2 * LOG_BYTES + steps * STEP_BYTES
    return [
        (f"{number} checkpoint{'s' * (number != 1)} of {size(checkpoint)}", number * checkpoint, "trainer.save_limit"),
        *([(f"{size(beside)} beside a model while its ranks write it", beside, "")] if beside else []),
        (f"an export of {size(model.weights)}", model.weights, ""),
        (f"a journal of {size(journal)}", journal, to_shorten if groups > journal else ""),
        (f"an index of samples of {size(index)}", index, ""),
        (f"samples.jsonl of {size(samples)}", samples, "trainer.samples_per_step"),
        (f"{size(logs)} of metrics and logs", logs, ""),
    ]


def _saved_weights(config: RunConfig, plan: MemoryPlan) -> int:
    """Bytes of a checkpoint's weights: with LoRA its adapters alone."""
    return plan.model.published if config.model.lora.rank else plan.model.weights


def _beside_model(config: RunConfig, plan: MemoryPlan) -> int:
    """Bytes of the ranks' parts of a checkpoint's `model/`, and of the file that they are put together in: both are
    there until the folder is whole (learner/training/sharded_files.py)."""
    return 0 if not config.learner.is_divided or config.model.lora.rank else 2 * _saved_weights(config, plan)


def _optimiser_state(plan: MemoryPlan) -> int:
    """Bytes of a checkpoint's other large file: master weights and moments."""
    return plan.model.masters + plan.model.moments
