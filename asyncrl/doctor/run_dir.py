"""Is the run directory free and writable, and has its disk room for what the run will write?"""

from __future__ import annotations

import resource
import shutil
import tempfile
from pathlib import Path

from asyncrl.config.schema import RunConfig
from asyncrl.doctor.findings import Finding, Findings, size, split_fix
from asyncrl.errors import RunTakenError, UserError
from asyncrl.launch.train import check_run_dir, is_resumable
from asyncrl.memory_plan.plan import GIB, MemoryPlan
from asyncrl.run_lock import refuse_busy

MIB = 2**20
INDEX_SHARE = 0.3
"""Of samples.sqlite, against the groups that it lists (docs/results.md)."""


def find_run_dir(config: RunConfig) -> Findings[None]:
    path = config.run_path
    folder = nearest_folder(path)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b" ")
            file.flush()
    except OSError as error:
        value = f"nothing can be written in {folder}: {error.strerror}"
        yield Finding("run_dir", value, "problem", "set run_dir to a folder that you may write, on a disk with room")
        return
    try:
        refuse_busy(path)
    except RunTakenError as error:
        value, fix = split_fix(str(error))
        yield Finding("run_dir", value, "problem", fix)
        return
    try:
        check_run_dir(config, resume=False)
    except UserError as error:
        value, fix = split_fix(str(error).removeprefix("run_dir "))
        yield Finding("run_dir", value, "warning" if is_resumable(path) else "problem", fix)
    else:
        yield Finding("run_dir", f"{path} is free, and {folder} can be written")


def _largest_journal(config: RunConfig, num_rows: int | None) -> tuple[int, int]:
    """Bytes of groups, and of those among them that stay after their checkpoint: at most its limits, and no more than
    the run has, where its steps are known.
    """
    waiting, kept = config.trainer.journal_limit_mib * MIB, int(config.trainer.keep_samples_gib * GIB)
    if num_rows is None and not config.trainer.max_steps:
        return waiting + kept, kept
    groups = config.total_steps(num_rows or 0) * config.batch.prompts_per_step
    written = groups * config.group_bytes(config.batch.group_size)
    return min(waiting + kept, written), min(kept, written)


def find_disk(config: RunConfig, plan: MemoryPlan, num_rows: int | None) -> Findings[None]:
    """Of training rows: None where they cannot be read."""
    folder = nearest_folder(config.run_path)
    learner, trainer = plan.learner, config.trainer
    model = learner.published if config.model.lora.rank else learner.weights
    checkpoint = model + learner.moments
    checkpoints = trainer.save_limit + 1  # the new one is whole before the oldest goes
    journal, kept = _largest_journal(config, num_rows)
    index = int(kept * INDEX_SHARE)
    needed = checkpoints * checkpoint + learner.weights + journal + index
    free = shutil.disk_usage(folder).free
    value = (
        f"{size(free)} free in {folder}; the run writes up to {size(needed)}: {checkpoints} checkpoints of "
        f"{size(checkpoint)}, a journal of {size(journal)}, an index of samples of {size(index)}, an export; "
        "and images of samples"
    )
    fix = (
        "make room, set run_dir on a larger disk, or lower trainer.save_limit, trainer.keep_samples_gib and "
        "trainer.journal_limit_mib"
    )
    yield Finding("disk of run_dir", value, "problem", fix) if free < needed else Finding("disk of run_dir", value)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    largest = max(learner.moments, model)
    if limit != resource.RLIM_INFINITY and limit < largest:
        value = f"this process may write files of {size(limit)}, and a checkpoint has one of {size(largest)}"
        yield Finding("file sizes", value, "problem", "raise the limit: ulimit -f unlimited")


def nearest_folder(path: Path) -> Path:
    """The path, or what there is above it."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
