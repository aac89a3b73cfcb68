"""`asyncrl eval`: scores of a model folder on the held-out rows, as text and as JSON lines."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from asyncrl.config.load import load_config
from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import DataConfig
from asyncrl.data.dataset import open_validation
from asyncrl.environments.recording import describe_conversations
from asyncrl.errors import BadStateError, UserError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.database import JournalReader
from asyncrl.journal.run_inputs import describe_changes, scoring_at, scoring_settings
from asyncrl.rewards.score import labels_by, scores_by_label
from asyncrl.run_folder.contents import checkpoint_folders
from asyncrl.telemetry.jsonl import write_atomically
from asyncrl_plugins.evaluation.plain_scores import (
    EvaluatedRow,
    known_scores,
    score_held_out,
    scores_line,
    summarise,
)
from protocol.values import as_json


def run_eval(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    for flag in ("out", "decodings"):
        if (file := getattr(arguments, flag)) and not file.absolute().parent.is_dir():
            raise UserError(f"--{flag} is {file}, but there is no folder {file.absolute().parent}")
    if arguments.decodings:
        return _write_decodings(config, arguments)
    if column := arguments.by or config.evaluation.by:
        check_column(config.data, column)
    if config.environment.is_used:
        if arguments.prefix:
            raise UserError("--prefix begins completions of one turn, and an environment answers: leave --prefix out")
        from asyncrl_plugins.evaluation.held_out import play_held_out

        scored = play_held_out(config, arguments.model)
    else:
        scored = score_held_out(config, arguments.model, prefix=arguments.prefix)
    if arguments.out:
        write_scored(scored, arguments.out)
    print(describe_scores(config, scored))
    if column:
        print(describe_by(config, scored, column))
    if other := scored_otherwise(config, arguments.model):
        print(f"note: {other}")
    return 0


def _write_decodings(config: RunConfig, arguments: argparse.Namespace) -> int:
    """Scores of the model by each way of decoding, as text and in the file."""
    if given := [flag for flag in ("out", "by", "prefix") if getattr(arguments, flag)]:
        raise UserError(f"--decodings makes its own completions and keeps scores alone: leave --{given[0]} out")
    if config.environment.is_used:
        raise UserError("--decodings begins completions of one turn, and an environment answers: leave it out")
    from asyncrl_plugins.evaluation.decodings import score_decodings

    found = {name: asdict(scores) for name, scores in score_decodings(config, arguments.model).items()}
    arguments.decodings.write_text(json.dumps(found, indent=2), encoding="utf-8")
    return 0


def check_column(config: DataConfig, column: str) -> None:
    """Raise UserError for a column that the held-out rows do not have, before minutes are spent on their scores."""
    rows = open_validation(config)
    columns = sorted({*rows.columns} - config.prompt_columns) if rows else []
    if rows and column not in columns:
        raise UserError(f"--by is {column!r}, and the rows have the columns {', '.join(columns) or 'none'}")


def scored_otherwise(config: RunConfig, model: Path) -> str:
    """A sentence where the model is of a run that was scored by something else than these rewards and environment, up
    to the step of a checkpoint; empty for any other model."""
    above = model.absolute().parents[:3]
    run = next((folder for folder in above if (folder / JOURNAL_FILE).is_file()), None)
    if run is None:
        return ""
    step = next(
        (number for folder in above for number, path in checkpoint_folders(run).items() if path == folder), None
    )
    try:
        with closing(JournalReader(run / JOURNAL_FILE)) as journal:
            before = scoring_at(journal, step)
    except BadStateError as problem:
        return f"whether the run was scored by the same is not known: {problem}"
    changed = describe_changes(before, scoring_settings(config.reward, config.environment)) if before else {}
    said = f"these scores do not compare with the evaluations of {run}: {'; '.join(changed.values())}"
    return said if changed else ""


def describe_scores(config: RunConfig, scored: Sequence[EvaluatedRow]) -> str:
    """Text that `asyncrl eval` prints. Raises as `summarise` does."""
    lines = [
        scores_line(
            summarise(scored, config.evaluation.group_size, config.reward.accuracy_component),
            config.evaluation.group_size,
            config.reward.accuracy_component,
        )
    ]
    if means := _component_means(scored):
        lines.append("components   " + "   ".join(f"{name} {mean:.4f}" for name, mean in means.items()))
    return "\n".join([*lines, *_conversation_lines(scored)])


def describe_by(config: RunConfig, scored: Sequence[EvaluatedRow], column: str) -> str:
    """A line of scores for each value of a column. Raises UserError for one with more than MOST_VALUES values."""
    size, name = config.evaluation.group_size, config.reward.accuracy_component
    labels = labels_by(column, [item.sample.columns.get(column) for item in scored[::size]], "--by")
    found = scores_by_label(labels, known_scores([item.score for item in scored], size, name))
    width = max(map(len, found))
    return "\n".join(f"{label:<{width}}   {scores_line(scores, size, name)}" for label, scores in found.items())


def _component_means(scored: Sequence[EvaluatedRow]) -> dict[str, float]:
    """Mean of each component over the completions that have a score."""
    known = [item.score.components for item in scored if item.score.reward is not None]
    return {name: fmean(components[name] for components in known) for name in (known[0] if known else ())}


def _conversation_lines(scored: Sequence[EvaluatedRow]) -> list[str]:
    """Means of turns and calls, and counts of ends and errors, for people; none where nothing was a conversation."""
    records = [item.record for item in scored if item.record is not None]
    if not records:
        return []
    found = {name.removeprefix("env/"): value for name, value in describe_conversations(records).items()}
    names = ("turns", "segments", "calls", "call_error_rate", "reward_with_calls", "reward_without_calls")
    ends = {name.removeprefix("ends/"): int(value) for name, value in found.items() if name.startswith("ends/")}
    errors = Counter(item.score.error_kind for item in scored if item.score.error_kind)
    lines = ["conversations   " + "   ".join(f"{name} {found[name]:.4f}" for name in names if name in found)]
    lines.append("ends   " + "   ".join(f"{name} {count}" for name, count in ends.items() if count))
    if errors:
        lines.append("without a score   " + "   ".join(f"{kind} {count}" for kind, count in errors.most_common()))
    return lines


def write_scored(scored: Sequence[EvaluatedRow], file: Path) -> None:
    """A line of JSON for each completion: its row with answer and columns, its text, and its components (or null); of a
    conversation its turns, too, and how it ended."""
    lines = (
        {
            "row_id": sample.row_id,
            "answer": as_json(sample.answer),
            "columns": as_json(sample.columns),
            "completion": sample.completion,
            "components": None if score.reward is None else score.components,
            "reward": score.reward,
            "error": score.error_message,
            **({"error_kind": score.error_kind, "end": record.end, "turns": list(turns)} if record else {}),
        }
        for sample, score, record, turns in scored
    )
    text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
    write_atomically(file, text.encode("utf-8", "surrogatepass"))
