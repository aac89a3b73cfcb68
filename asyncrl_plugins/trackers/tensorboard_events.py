"""TensorBoard: event files in `<run_dir>/tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import yaml
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from torch.utils.tensorboard import SummaryWriter

from asyncrl.telemetry.tracker import Sample, TrackedRun, numbers
from asyncrl_plugins.trackers.shown import flat

FOLDER = "tensorboard"
FLUSH_S = 10
COLUMNS = ("reward", "status", "completion")


class TensorBoardTracker:
    def __init__(self, run: TrackedRun, settings: None):
        # TensorBoard forgets this step and later ones of the files before this one: they are made again.
        made_again = None if run.resumed_after is None else run.resumed_after + 1
        self._writer = SummaryWriter(run.run_path / FOLDER, purge_step=made_again, flush_secs=FLUSH_S)
        for evaluation in run.evaluations:
            self.evaluation(*numbers(evaluation))
        self._text(0, "configuration", f"```yaml\n{yaml.safe_dump(dict(run.config), sort_keys=False)}```")
        self._writer._get_file_writer().add_summary(hparams_pb(dict(flat(run.config))), 0)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def evaluation(self, step: int, results: Mapping[str, float]) -> None:
        self.step(step, {f"held_out/{name}": value for name, value in results.items()})

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        for number, sample in enumerate(samples):
            self._text(step, f"samples/{number}", _table(sample))
            for place, shown in enumerate(sample.pictures()):
                self._writer.add_image(f"samples/{number}/{place}", np.asarray(shown), step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()

    def _text(self, step: int, tag: str, markdown: str) -> None:
        # SummaryWriter.add_text would append /text_summary to the tag.
        self._writer._get_file_writer().add_summary(text_pb(tag, markdown), step)


def _table(sample: Sample) -> str:
    """Write a sample in Markdown. Model text is code, so that it formats nothing."""
    record = sample.record
    lines = [
        f"**prompt** {_code(record.get('prompt'))} **answer** {_code(record.get('answer'))}",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for completion in record.get("completions", ()):
        reward = completion.get("reward")
        shown = "-" if reward is None else f"{reward:.3f}"
        lines.append(f"| {shown} | {completion.get('status', '')} | {_code(completion.get('text'))} |")
    return "\n".join(lines)


def _code(text: Any) -> str:
    line = " ".join(str(text or "").split()).replace("`", "'").replace("|", "\\|")
    return f"`{line}`" if line else ""
