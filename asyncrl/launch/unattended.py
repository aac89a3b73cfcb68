"""Begin or continue? What a learner that is started again by a machine, such as a container's, has to decide."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from asyncrl.config.schema import RunConfig
from asyncrl.launch.train import is_resumable
from asyncrl.run_folder.failure import refuse_bad_state
from asyncrl.telemetry.recorder import is_finished, read_status

Attempt = Literal["begin", "continue", "nothing"]


def next_attempt(config: RunConfig) -> Attempt:
    """What there is to do in run_dir. After a crash, an interruption or a full disk that is to go on.

    Raises BadStateError where the run stopped in bad state: another attempt would meet the same, or hide it; UserError
    where that cannot be read.
    """
    refuse_bad_state(config.run_path)
    if is_finished(config.run_path):
        return "nothing"
    return "continue" if is_resumable(config.run_path) else "begin"


def finished(config: RunConfig, file: Path) -> str:
    """What is said where there is nothing to do. A finished run is not continued by a machine, whatever `file` says."""
    text, step = f"the run in {config.run_dir} is finished", read_status(config.run_path).get("step")
    if isinstance(step, int) and config.trainer.max_steps > step:
        text += (
            f", at step {step}, and trainer.max_steps is {config.trainer.max_steps}. To continue it: "
            f"asyncrl learn {file} --resume, with the same settings"
        )
    return text
