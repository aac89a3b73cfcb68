"""Bad rows of distillation: those without a teacher, and those that a privileged prompt cannot be made of."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.config.sections import DataConfig
from asyncrl.data.dataset import RowSource, open_train
from asyncrl.errors import UserError, did_you_mean
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.distillation.rows import Hint, teacher_of, text_of
from asyncrl_plugins.distillation.settings import DistillationConfig
from learner.tickets.ticket_hook import TicketContext, TicketRow, TrajectoryChange
from protocol.messages import ChatMessage, Prompt, TextPart

logger = logging.getLogger(__name__)
WHERE = "algorithm.distillation"


class TeacherRows:
    """Hook of tickets that changes none: as a run begins, it refuses rows that no teacher can score."""

    def __init__(self, settings: DistillationConfig, context: TicketContext):
        """Raises UserError for a column that no row has, for a teacher of no row, and for a bad row under
        data.on_bad_row=stop."""
        if not settings.teachers and not settings.privileged:
            return
        rows, survey = open_train(context.data, "environment"), context.survey
        hint = Hint(settings.privileged)
        columns = dict(_columns(rows, [*filter(None, [settings.teacher_key]), *hint.columns], context.data))
        found = {index: {name: column[index] for name, column in columns.items()} for index in survey.usable}
        hints = _Hints(hint, settings.privileged_tokens, context.processor)
        bad = {}
        for index, row in found.items():
            problem = _unknown_teacher(settings, row) or hints.problem(row)
            if problem:
                bad[index] = f"row {rows.row_id(index)}: {problem}"
        survey.check(context.data, bad)
        if settings.teachers:
            _count_teachers(settings, [found[index] for index in survey.usable])

    def __call__(self, row: TicketRow) -> dict[int, TrajectoryChange]:
        return {}


def _columns(rows: RowSource, names: list[str], data: DataConfig) -> Iterator[tuple[str, list[Any]]]:
    """Columns of all rows by the names that a ticket's prompt has for them."""
    carried = {*rows.columns} - {data.prompt_key, data.image_key, data.video_key}
    for name in names:
        column = data.answer_key if name == "answer" and name not in carried else name
        if column not in carried:
            raise UserError(
                f"{WHERE} names the column {name!r}, and no row has it beside prompt and images."
                f"{did_you_mean(name, carried)} Columns are {', '.join(sorted(carried))}. Name one of them"
            )
        yield name, rows.column(column)


def _unknown_teacher(settings: DistillationConfig, row: Mapping[str, Any]) -> str:
    key = settings.teacher_key
    if not settings.teachers or teacher_of(row, key, settings.teachers) is not None:
        return ""
    return (
        f"{text_of(row[key])!r} in column {key!r} ({WHERE}.teacher_key) is no teacher. Teachers are "
        f"{', '.join(settings.teachers)}: add one of the name default for all other values, or leave the row out"
    )


def _count_teachers(settings: DistillationConfig, rows: list[Mapping[str, Any]]) -> None:
    counts = Counter(teacher_of(row, settings.teacher_key, settings.teachers) for row in rows)
    for name, folder in settings.teachers.items():
        if not counts[name]:
            raise UserError(
                f"{WHERE}.teachers has {name} ({folder}), and no usable row has that value in the column "
                f"{settings.teacher_key!r}. Mend its name, or leave it out: it would be loaded for nothing"
            )
    said = (f"{name} ({folder}) teaches {counts[name]:,}" for name, folder in settings.teachers.items())
    logger.info("of %s training rows, %s", f"{len(rows):,}", ", ".join(said))


class _Hints:
    """Checks of privileged texts, each text once."""

    def __init__(self, hint: Hint, most_tokens: int, processor: PromptProcessor):
        self._hint = hint
        self._most = most_tokens
        self._processor = processor
        self._known: dict[str, str] = {}

    def problem(self, row: Mapping[str, Any]) -> str:
        """Reason for which a row has no privileged prompt; empty where it has one."""
        if missing := self._hint.missing(row):
            return (
                f"there is no text in column {missing[0]!r}, which {WHERE}.privileged shows to the teacher. Give it "
                "one or leave the row out"
            )
        text = self._hint.of(row)
        if text and text not in self._known:
            self._known[text] = self._of_text(text)
        return self._known.get(text, "")

    def _of_text(self, text: str) -> str:
        tokens = len(self._processor.tokenize(text))
        if tokens > self._most:
            return (
                f"its text of {WHERE}.privileged has {tokens} tokens, over privileged_tokens = {self._most}. Raise the "
                "limit or shorten the text"
            )
        message = ChatMessage(role="user", content=(TextPart(text=text),))
        try:
            self._processor.measure(Prompt(row_id="a hint", messages=(message,)), {})
        except UserError as error:
            return f"its text of {WHERE}.privileged: {error}"
        return ""
