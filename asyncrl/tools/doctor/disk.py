"""Has the disk of the run directory room for what the run will write?"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

from asyncrl.config.schema import RunConfig
from asyncrl.run_folder.checkpoints import CHECKPOINTS, checkpoint_folders
from asyncrl.tools.doctor.findings import Finding, Findings, size
from asyncrl.tools.doctor.run_dir import nearest_folder
from asyncrl.tools.memory_plan.plan import GIB, MemoryPlan

MIB = 2**20
HEADER_BYTES = 200
"""Of a trajectory in the journal, beside its arrays."""
INDEX_SHARE, INDEX_ROW_BYTES = 0.3, 200
"""Of samples.sqlite: against the groups that it lists (docs/results.md), and of each trajectory besides."""
STEP_BYTES = 8192
"""Of metrics.jsonl and timeline.jsonl."""
SAMPLE_BYTES, TEXT_BYTES, ID_BYTES = 500, 6, 8
"""Of samples.jsonl: a trajectory beside its tokens, and of a token its text and, in a completion, its id."""
LOGS_BYTES = 32 * MIB
"""What SQLite has not copied yet, and what the services log."""


class Part(NamedTuple):
    text: str
    nbytes: int
    setting: str = ""
    """That makes it smaller."""


def find_disk(config: RunConfig, plan: MemoryPlan, num_rows: int | None) -> Findings[None]:
    """`num_rows` of training: None where they cannot be read. A checkpoint that a crash adds is not counted."""
    folder = nearest_folder(config.run_path)
    free = shutil.disk_usage(folder).free
    if num_rows is None and not config.trainer.max_steps:
        value = f"{size(free)} free in {folder}; how much the run writes is not known without its training rows"
        yield Finding("disk of run_dir", value, "note")
        return
    parts = list(_parts(config, plan, config.total_steps(num_rows or 0)))
    needed = sum(part.nbytes for part in parts)
    written = _written(config.run_path)
    already = f", {size(written)} written already" if written else ""
    value = (
        f"{size(free)} free in {folder}{already}; the run writes up to {size(needed)}: "
        f"{', '.join(part.text for part in parts)}; and images of samples"
    )
    if free + written < needed:
        settings = [part.setting for part in parts if part.setting and part.nbytes > 0.1 * needed]
        lower = f", or lower {' and '.join(settings)}" if settings else ""
        yield Finding("disk of run_dir", value, "problem", f"make room, set run_dir on a larger disk{lower}")
    else:
        yield Finding("disk of run_dir", value)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    largest = max(plan.learner.moments, _saved_weights(config, plan))
    if limit != resource.RLIM_INFINITY and limit < largest:
        value = f"this process may write files of {size(limit)}, and a checkpoint has one of {size(largest)}"
        yield Finding("file sizes", value, "problem", "raise the limit: ulimit -f unlimited")


def _parts(config: RunConfig, plan: MemoryPlan, steps: int) -> Iterator[Part]:
    trainer, data, group_size = config.trainer, config.data, config.batch.group_size
    trajectories = steps * config.trajectories_per_step
    arrays = steps * config.batch.prompts_per_step * config.group_bytes(group_size)
    groups = arrays + trajectories * HEADER_BYTES
    waiting, kept = trainer.journal_limit_mib * MIB, int(trainer.keep_samples_gib * GIB)

    each = _saved_weights(config, plan) + plan.learner.moments
    there = checkpoint_folders(config.run_path)
    done = min(max(there, default=0), steps)
    saves = len(there)
    if done < steps:
        saves += 1 + groups * (steps - done) // steps // waiting
        saves += (steps - 1) // trainer.save_freq - done // trainer.save_freq if trainer.save_freq else 0
    number = min(trainer.save_limit + 1, saves)  # the new one is whole before the oldest goes
    yield Part(f"{number} checkpoint{'s' * (number != 1)} of {size(each)}", number * each, "trainer.save_limit")
    yield Part(f"an export of {size(plan.learner.weights)}", plan.learner.weights)
    journal = min(groups, waiting + kept)
    setting = "trainer.keep_samples_gib" if kept > waiting else "trainer.journal_limit_mib"
    yield Part(f"a journal of {size(journal)}", journal, setting if groups > waiting + kept else "")
    index = int(INDEX_SHARE * arrays) + trajectories * INDEX_ROW_BYTES
    yield Part(f"an index of samples of {size(index)}", index)
    sample = SAMPLE_BYTES + (TEXT_BYTES + ID_BYTES) * data.max_response_length
    shown = min(trainer.samples_per_step, config.batch.prompts_per_step)
    samples = steps * shown * (TEXT_BYTES * data.max_prompt_length + group_size * sample)
    yield Part(f"samples.jsonl of {size(samples)}", samples, "trainer.samples_per_step")
    logs = LOGS_BYTES + steps * STEP_BYTES
    yield Part(f"{size(logs)} of metrics and logs", logs)


def _saved_weights(config: RunConfig, plan: MemoryPlan) -> int:
    return plan.learner.published if config.model.lora.rank else plan.learner.weights


def _written(run_path: Path) -> int:
    """Of these parts, by a run that is to be continued."""
    tops = (run_path / name for name in (CHECKPOINTS, "export", "logs"))
    within = (Path(folder, name) for top in tops for folder, _, names in os.walk(top) for name in names)
    return sum(map(_bytes, chain(run_path.glob("*"), within)))


def _bytes(file: Path) -> int:
    """0 of a folder, and of what has gone meanwhile or cannot be seen."""
    try:
        status = file.stat()
    except OSError:
        return 0
    return status.st_size if S_ISREG(status.st_mode) else 0
