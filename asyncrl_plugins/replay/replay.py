"""The command `python -m asyncrl_plugins.replay.replay RUN --step N`: make a step of a run again, and compare.

The steps from the newest checkpoint before it, or the initial model, up to N are made from the journal's groups, by the
code that makes steps again after a restart. Nothing is written, and a learner may be at work beside it.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import torch

from asyncrl.config.keys import all_keys
from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.devices.device import resolve_dtype
from asyncrl.environments.interface import PromptTools
from asyncrl.errors import UserError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.database import JournalReader
from asyncrl.journal.run_inputs import recorded_updates
from asyncrl.launch.command import command
from asyncrl.models.loading import load_model
from asyncrl.models.lora import read_adapter
from asyncrl.models.published import published_tensors
from asyncrl.processing.processor import PromptProcessor
from asyncrl.run_folder.contents import ADAPTER_FOLDER, CHECKPOINTS, MODEL_FOLDER, checkpoint_folder
from asyncrl.run_folder.failure import is_there, unreadable_as_user_error
from asyncrl.telemetry.jsonl import JsonlTail
from asyncrl.telemetry.recorder import CONFIG_FILE, METRICS_FILE
from asyncrl_plugins.replay.step_comparison import TOLERANCE, Comparison, compare_numbers, compare_weights
from learner.groups.recorded_batch import batch_again, read_batch
from learner.loop.checkpoint import complete_checkpoints, read_state
from learner.loop.resume import TOOLS, check_initial_model, update_settings
from learner.loop.trainer import Trainer
from learner.tickets.ticket_writer import TicketWriter

logger = logging.getLogger(__name__)

OF_RANK_1 = "rank_tokens/1"
"""A number in the record of a step that several ranks have made."""


@dataclass(frozen=True)
class ReplayableRun:
    """The journal, configuration, metrics and checkpoints from which steps are made again."""

    run_dir: Path
    journal: JournalReader
    config: RunConfig
    metrics: dict[int, dict[str, float | None]]
    """Lines of metrics.jsonl by step."""
    checkpoints: dict[int, Path]

    @classmethod
    def open(cls, run_dir: Path, step: int, overrides: Sequence[str]) -> ReplayableRun:
        """Open a run for a step, with the settings that it was made by and then `overrides`.

        Raises UserError where there is none, or it cannot be read.
        """
        for name in (JOURNAL_FILE, CONFIG_FILE):
            if not is_there(run_dir / name):
                raise UserError(f"there is no {name} in {run_dir}: a step is made again in the run's own directory")
        lines, _ = JsonlTail(run_dir / METRICS_FILE).new_records()
        is_there(run_dir / CHECKPOINTS)  # an unreadable folder would look empty
        checkpoints = complete_checkpoints(run_dir)
        journal = JournalReader(run_dir / JOURNAL_FILE, untouched=True)
        try:
            begin = begin_before(step, checkpoints)
            words = _settings_of(journal, _load(run_dir, ()), begin, step)
            own, config = _load(run_dir, words), _load(run_dir, [*words, *overrides])
            _check_overrides(own, config, json.loads(journal.meta("settings") or "{}"))
        except UserError:
            journal.close()
            raise
        return cls(run_dir, journal, config, {int(line["step"]): line for line in lines}, checkpoints)

    def check(self, step: int) -> None:
        """Raise UserError unless the run has everything that the step needs."""
        kept, taken = self.journal.kept_steps(), self.journal.consumed_by_step()
        whole = {number for number, groups in kept.items() if groups == taken[number]}
        if not self._has(step, whole):
            newest = next((number for number in sorted(whole, reverse=True) if self._has(number, whole)), "none")
            raise UserError(
                f"step {step} of {self.run_dir} cannot be made again: the run has not trained it, {METRICS_FILE} has "
                f"no line of it, or groups of a step since step {begin_before(step, self.checkpoints)} are not kept "
                f"any more (trainer.keep_samples_gib). The newest that can is {newest}"
            )

    def _has(self, step: int, whole: Collection[int]) -> bool:
        """Return whether the step is recorded, and the groups of it and of those before it are kept (`whole` steps)."""
        steps = range(begin_before(step, self.checkpoints) + 1, step + 1)
        return step in self.metrics and all(number in whole for number in steps)


def begin_before(step: int, checkpoints: Iterable[int]) -> int:
    """Return the step of the checkpoint that `step` is made from; 0 for the initial model."""
    return max((number for number in checkpoints if number < step), default=0)


def _load(run_dir: Path, overrides: Sequence[str]) -> RunConfig:
    return resolve_dtype(load_config(run_dir / CONFIG_FILE, [*overrides, f"run_dir={run_dir}"]))


def _settings_of(journal: JournalReader, newest: RunConfig, begin: int, step: int) -> list[str]:
    """Return overrides that turn the run's `newest` settings into those of the steps after `begin`, up to `step`.

    Raises UserError where they have changed between.
    """
    recorded = [update for update in recorded_updates(journal) if update.after_step < step]
    if not recorded:
        return []
    if recorded[-1].after_step > begin:
        raise UserError(
            f"step {step} of {journal.path.parent} cannot be made again: settings have changed after step "
            f"{recorded[-1].after_step}, whose checkpoint is not there any more. Restore it from a backup"
        )
    now, words = update_settings(newest), list[str]()
    for key, value in recorded[-1].settings.items():
        if now.get(key) == value:
            continue
        if key in all_keys():
            words.append(f"{key}={value if isinstance(value, str) else json.dumps(value)}")
        else:
            logger.warning("%s: it was %s at step %d, and is %s", key, value, step, now.get(key))
    return words


def _check_overrides(own: RunConfig, config: RunConfig, settings: Iterable[str]) -> None:
    """Raise UserError for an override of `settings`, the names of those by which the journal's groups were sampled.

    Some of these names are no keys: what they stand for cannot be overridden.
    """
    for name in settings:
        try:
            before, now = (attrgetter(name)(one) for one in (own, config))
        except AttributeError:
            continue
        if before != now:
            raise UserError(
                f"{name}={now} cannot be tried on a step of the journal: its groups were handed out and sampled with "
                f"{before}. Leave it out; what can be tried is a setting of the update, such as learner.optim.lr"
            )


def in_one_process(config: RunConfig) -> RunConfig:
    """Run without ranks: a step is recomputed where the command is given."""
    learner = config.learner
    if not learner.is_divided:
        return config
    kept = learner.model_dump(include=set(type(learner).model_fields))  # without settings of the engine's own
    alone = type(learner).model_validate(kept | {"engine": "torch", "num_processes": 1, "cpu_offload": False})
    return config.model_copy(update={"learner": alone})


def replay(run: ReplayableRun, step: int) -> Iterator[Comparison]:
    """Make each step from the checkpoint to `step` again, and compare it. Raises UserError where groups are missing."""
    run.check(step)
    start = begin_before(step, run.checkpoints)
    torch.manual_seed(run.config.trainer.seed)  # as a learner does at its start
    checkpoint = run.checkpoints.get(start)
    state = read_state(checkpoint) if checkpoint else None
    config = in_one_process(run.config)
    processor = PromptProcessor(config.model, config.data.chat_template_kwargs)
    if tools := json.loads(run.journal.meta("settings") or "{}").get(TOOLS):  # as recorded: no environment is run
        processor.show_tools(PromptTools.from_json(tools))
    if checkpoint and state and not state.adapter:
        config = config.with_policy(checkpoint / MODEL_FOLDER)
    writer = TicketWriter(config.ticket_settings, processor, processor.ends.stop_token_ids)
    training = Trainer(config, processor, writer.num_train_rows, checkpoint, state)
    if checkpoint is None:
        check_initial_model(run.journal, training.engine.published_state())
    size, device = config.batch.prompts_per_step, training.engine.device
    again = (run.metrics.get(number, {}) for number in range(start + 1, step + 1))
    by_ranks = run.config.learner.is_divided or any(OF_RANK_1 in line for line in again)
    is_exact = device.type == "cpu" and not by_ranks  # they add up in another order
    tolerance = 0.0 if is_exact else TOLERANCE[config.model.dtype]
    while training.progress.step < step:
        number = training.progress.step + 1
        recorded = run.metrics.get(number, {})
        if threads := recorded.get("cpu_threads"):
            torch.set_num_threads(int(threads))
        if tokens := recorded.get("memory/tokens_per_microbatch"):  # chosen, or what memory left of it
            training.step.budget.repeat(int(tokens))
        version = training.progress.version
        groups = read_batch(run.journal, number, size)
        _, values = training.learn(batch_again(groups, writer.write, version, config.learner.on_stale))
        weights = None
        if number in run.checkpoints and number == step:
            saved = _saved_weights(config, checkpoint_folder(run.run_dir, number), device)
            weights = compare_weights(saved, dict(training.engine.published_state()), tolerance)
        yield Comparison(number, tolerance, compare_numbers(recorded, values, tolerance), weights)


def _saved_weights(config: RunConfig, checkpoint: Path, device: torch.device) -> dict[str, torch.Tensor]:
    state = read_state(checkpoint)
    if state.adapter:
        return read_adapter(checkpoint / ADAPTER_FOLDER)
    model = config.model.model_copy(update={"path": str(checkpoint / MODEL_FOLDER)})
    return dict(published_tensors(load_model(model, device=device)))


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if the step is equal and 1 if it differs; 2 and 3 as every service does."""
    parser = argparse.ArgumentParser(prog="asyncrl replay", description="Make a learner step again, and compare.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="to see what another setting would change")
    parsed = parser.parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    with unreadable_as_user_error():
        run = ReplayableRun.open(parsed.run_dir, parsed.step, parsed.overrides)
        with closing(run.journal):
            compared = list(replay(run, parsed.step))
    *before, last = compared
    start = begin_before(parsed.step, run.checkpoints)
    beginning = f"the checkpoint of step {start}" if start else "the initial model"
    print(f"step {parsed.step} of {parsed.run_dir}, from {beginning}")
    differing = [c.step for c in before if not c.is_equal]
    if before:
        named = ", ".join(map(str, differing)) or "none"
        print(f"steps between: {before[0].step} to {before[-1].step}; {named} differ")
    print(last.table())
    return 0 if last.is_equal and not differing else 1


if __name__ == "__main__":
    sys.exit(main())
