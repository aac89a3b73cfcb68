"""Begin or continue? What a learner that is started again by a machine, such as a container's, has to decide."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError
from asyncrl.launch.train import is_resumable
from asyncrl.telemetry.failure import FAILURE_FILE, read_failure
from asyncrl.telemetry.recorder import is_finished, read_status

Attempt = Literal["begin", "continue", "nothing"]


def next_attempt(config: RunConfig) -> Attempt:
    """What there is to do in run_dir. After a crash, an interruption or a full disk that is to go on.

    Raises BadStateError where the run stopped in bad state: another attempt would meet the same, or hide it.
    """
    failure = read_failure(config.run_path)
    if failure is not None and failure.kind == "bad_state":
        at = f" at step {failure.step}" if failure.step is not None else ""
        raise BadStateError(
            f"the run in {config.run_dir} stopped in bad state{at}: {failure.reason}. When the cause is mended, "
            f"continue by hand with `asyncrl learn CONFIG --resume`, or remove {config.run_path / FAILURE_FILE}"
        )
    if is_finished(read_status(config.run_path)):
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
