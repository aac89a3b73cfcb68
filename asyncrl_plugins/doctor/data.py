"""Checks of rows (length, refusals, train/held-out overlap) and rewards."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from asyncrl.config.schema import RunConfig
from asyncrl.config.sections import DataConfig, ModelConfig, RewardConfig, component_name
from asyncrl.data.dataset import RowSource
from asyncrl.data.prompts import PromptRenderer, RenderedPrompt
from asyncrl.data.survey.row_survey import PromptRows, RowSurvey
from asyncrl.errors import UserError
from asyncrl.memory_plan import size
from asyncrl.model_files.folder import model_folder, weight_files
from asyncrl.processing.processor import PromptProcessor, prompt_processor
from asyncrl.rewards.builtin import accepted_answers
from asyncrl.rewards.sample import RewardSample, sample_of
from asyncrl.rewards.score import Score
from asyncrl.rewards.scorer import RewardScorer
from asyncrl.rewards.spec import check_rewarded, check_rewards, hidden_columns, scorer_of
from asyncrl_plugins.doctor.findings import Finding, Findings, split_fix

COMPARED_ROWS = 64
"""Rows whose text is looked at for a template that forgets the question."""
_ROW = re.compile(r"^row \S+?(?=[,:] | has )(, (?:image|video) \d+)?:? ?")


def find_prompts(config: RunConfig, rows: RowSource, purpose: str, renderer: PromptRenderer) -> Findings[RowSurvey]:
    """Report rows, bad rows and lengths of all rows; `purpose` is training or held-out."""
    processor, data = prompt_processor(config.model, config.environment, config.data.chat_template_kwargs), config.data
    if purpose == "training":
        ends = processor.ends
        yield Finding("stop tokens", ends.described, "ok" if ends.added is None else "note")
    survey = PromptRows(rows, data, processor, config.network.max_message_mib, purpose).survey()
    took = f"looked at in {survey.seconds:.0f} s" if survey.seconds else "looked at before"
    columns = ", ".join(rows.columns)
    yield Finding(f"{purpose} rows", f"{len(rows):,} with columns {columns}; all of them {took}")
    counted = f"{len(rows):,} {purpose} rows"
    left_out = survey.leaves_out(data)
    for refused in _alike(survey):
        reason, fix = split_fix(refused[0][1])
        value = f"{len(refused):,} of {counted} cannot be used (such as {refused[0][0]}): {reason}"
        fix = fix or "fix these rows or leave them out"
        if left_out:
            yield Finding("bad rows", f"{value}; they are left out (data.on_bad_row=skip)", "warning", fix)
        else:
            yield Finding("bad rows", value, "problem", fix)
    if any(survey.facts):
        yield _judge_lengths(survey, data, counted, left_out=left_out)
    texts, questions = _compare(data, rows, survey.usable[:COMPARED_ROWS], renderer, processor)
    if purpose == "training" and (own := max(map(processor.template.described_system_prompt, texts), default="")):
        yield Finding("system prompt", own, "note")
    if len(texts) == 1 and len(questions) > 1:
        number = min(COMPARED_ROWS, len(survey.usable))
        value = f"all of {number} {purpose} rows become one and the same prompt, though they ask different things"
        fix = "the template (data.format_prompt, or the model's chat template) has to print `content`"
        yield Finding("template", value, "problem", fix)
    return survey


def find_overlap(train: RowSurvey, held_out: RowSurvey) -> Findings[None]:
    """Report held-out prompts that are also in the training data."""
    shared, asked = held_out.shared_with(train), {facts.prompt for facts in held_out.facts if facts}
    value = f"{len(shared):,} of {len(asked):,} held-out prompts are trained on, too"
    if shared:
        held, same = held_out.row_ids(shared[0][0]), train.row_ids(shared[0][1])
        fix = "take them out of one of data.train_files and data.val_files"
        yield Finding("held-out is apart", f"{value}: {held} is {same}", "warning", fix)
    else:
        yield Finding("held-out is apart", value)


def _alike(survey: RowSurvey) -> Iterable[list[tuple[str, str]]]:
    """Rows that were refused and their messages, those together that have the same wrong with them."""
    alike: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for index, error in sorted(survey.refused.items()):
        message = _ROW.sub("", error)
        alike[re.sub(r"\d+|'[^']*'|\S*/\S*", "#", message)].append((survey.row_ids(index), message))
    return alike.values()


def _compare(
    config: DataConfig, rows: RowSource, indices: Sequence[int], renderer: PromptRenderer, processor: PromptProcessor
) -> tuple[set[str], set[str]]:
    """Prompts of some rows, and their questions before any template."""
    texts, questions = set[str](), set[str]()
    for index in indices:
        row = rows[index]
        texts.add(processor.render(renderer.render(row, rows.row_id(index)).prompt))
        questions.add(str(row.get(config.prompt_key)))
    return texts, questions


def _judge_lengths(survey: RowSurvey, config: DataConfig, counted: str, *, left_out: bool) -> Finding:
    """Report min, median and max length; a problem if rows over the limit are not left out."""
    lengths, limit = np.array([facts.tokens for facts in survey.facts if facts]), config.max_prompt_length
    value = (
        f"{lengths.min()} to {lengths.max()} tokens, median {int(np.median(lengths))}; data.max_prompt_length={limit}"
    )
    over = survey.overlong
    if not over:
        return Finding("prompt lengths", value)
    value = f"{len(over):,} of {counted} are longer (such as {survey.row_ids(next(iter(over)))}): {value}"
    if left_out:
        return Finding("prompt lengths", f"{value}; they are left out", "note")
    leave = ", or data.on_bad_row=skip to leave such rows out" if survey.usable else ""
    most = int(np.percentile(lengths, 99, method="lower"))  # one odd row decides neither memory nor speed of all
    fix = f"set data.max_prompt_length={lengths.max()}{leave}"
    if limit < most < lengths.max():
        fix = f"set data.max_prompt_length={most} for 99 of 100 rows, {lengths.max()} for all{leave}"
    return Finding("prompt lengths", value, "problem", fix)


# --- rewards ---------------------------------------------------------------------------------------

ROWS = 3
"""Rows that are scored."""
ROWS_TRIED = 100
"""Rows looked at for that: those that cannot be rendered do not count."""
NOTHING = "nothing"
BOXED = "the answer in \\boxed{}"
_WHOLE = ("boxed_match", "contains", "exact_match")
"""Rewards that look for the whole answer."""
_FORM = "look whether the reward wants a form that data.format_prompt or the warm start teaches; if not, fix it"


def find_rewards(
    config: RunConfig, rows: RowSource, renderer: PromptRenderer, survey: RowSurvey | None = None
) -> Findings[None]:
    """Score a few usable rows; any that can be rendered where there is no survey to say which are usable."""
    check_rewarded(config.reward, config.environment)
    check_rewards(config.reward)
    if not config.reward.functions:
        yield Finding("reward", f"{config.environment.name} alone rewards: its turns (reward.functions is empty)")
        return
    for hidden in hidden_columns(config.reward, {*rows.columns} - config.data.prompt_columns):
        value, fix = split_fix(hidden)
        yield Finding("reward", value, "warning", fix)
    yield from _reward_models(config)
    indices = range(len(rows)) if survey is None else survey.usable
    rendered = list(islice(_rendered_rows(rows, indices, renderer), ROWS))
    scored = asyncio.run(_score(config, rendered))
    failed = ((name, score) for scores in scored.values() for name, score in scores.items() if score.status != "ok")
    for name, score in failed:
        value = f"{score.error_kind} on {name}: {score.error_message}"
        fix = "fix the function: a trajectory that it fails on is left out of training, never scored 0"
        yield Finding("reward", value, "problem", fix)
        return  # the others are of the same function
    if not scored:
        yield Finding("reward", "was loaded, but there is no usable row to score", "note")
        return
    completions = list(dict.fromkeys(name for scores in scored.values() for name in scores))
    answers = [one.prompt.answer for one, _ in rendered if one.prompt.answer is not None]
    yield from _worked_answers(config.reward, answers)
    yield from _judge_components(config, list(scored.values()), completions, answers)
    alike = [row for row, scores in scored.items() if len({score.reward for score in scores.values()}) == 1]
    if alike and not config.environment.is_used:
        on = f" on {', '.join(alike)}" if len(alike) < len(scored) else ""
        told = " or ".join(name for name in completions if name != NOTHING)
        fix = _FORM
        if on:
            fix = "look at the answers of these rows (data.answer_key)"
        yield Finding("reward", f"the weighted sum does not tell {told} from {NOTHING}{on}", "warning", fix)


def _worked_answers(config: RewardConfig, answers: Sequence[Any]) -> Iterator[Finding]:
    """A warning where a reward looks for the whole answer, and the answer is a worked solution."""
    name = next((each.function for each in config.functions if each.function in _WHOLE), None)
    worked = next((a for a in answers if isinstance(a, str) and ("\n" in a.strip() or "####" in a)), None)
    if name and worked:
        value = f"{name} looks for the whole answer, and an answer is a worked solution: {worked[:60]!r}"
        fix = "reward its last number by number_match (GSM8K's `#### 72`), or write the short answer into a column"
        yield Finding("reward", value, "warning", f"{fix} and name it in data.answer_key")


def _judge_components(
    config: RunConfig, scored: Sequence[dict[str, Score]], completions: Sequence[str], answers: Sequence[Any]
) -> Iterator[Finding]:
    """Report values of each component; a warning if it is the accuracy, or one of all, and tells no row's answer from
    nothing. Others may do so: they score form or length. With an environment, a bare answer is no whole trajectory."""
    reward = config.reward
    telling = {
        name for name in reward.component_names for row in scored if len({row[c].components[name] for c in row}) > 1
    }
    for component in reward.component_names:
        given = {
            name: ", ".join(f"{row[name].components[component]:g}" for row in scored if name in row)
            for name in completions
        }
        value = f"{component}: {'; '.join(f'{each} for {name}' for name, each in given.items())}"
        is_accuracy = component == reward.accuracy_component
        if component in telling or not answers:
            yield Finding("reward", value)
        elif config.environment.is_used or (telling and not is_accuracy):
            yield Finding("reward", f"{value}, all the same", "note")
        else:
            types = list(dict.fromkeys(type(answer).__name__ for answer in answers))
            shown = json.dumps(answers[0], ensure_ascii=False, default=str)
            value += f": it cannot tell the answer from nothing; the answers are {' and '.join(types)}: {shown}, "
            fix = _fix_of_component(answers)
            if is_accuracy and telling:
                others = [name for name in reward.component_names if name in telling]
                fix += f"; or report another as accuracy (reward.accuracy={others[0]})"
            yield Finding("reward", f"{value}which a completion says as {_said(answers[0])!r}", "warning", fix)


def _fix_of_component(answers: Sequence[Any]) -> str:
    """Advice for a component that gives the answers no more than nothing."""
    if all(isinstance(answer, str) for answer in answers):
        return _FORM
    fix = "a completion is text, so compare text with text"
    if all(isinstance(answer, int | float) and not isinstance(answer, bool) for answer in answers):
        return f"{fix}, or numbers by the reward number_match"
    return f"{fix}, as the reward exact_match does" if all(map(_is_plain, answers)) else fix


def _is_plain(answer: Any) -> bool:
    """True where the built-in rewards can read the answer."""
    try:
        return bool(accepted_answers(RewardSample("", answer=answer)))
    except ValueError:
        return False


def _reward_models(config: RunConfig) -> Iterator[Finding]:
    """Memory of reward models, which the memory plan leaves out: every rollout server has the weights of each once."""
    for part in config.reward.functions:
        scorer = scorer_of(part)
        path, device = scorer.model(part) if scorer else ("", "")
        if path:
            nbytes = sum(file.stat().st_size for file in weight_files(model_folder(ModelConfig(path=path))))
            each = f", for each of {config.rollout.servers} servers" if config.rollout.servers > 1 else ""
            value = f"{component_name(part)}: {size(nbytes)} of weights on {device}{each}; the plan is without it"
            yield Finding("reward model", value, "note")


def _rendered_rows(
    rows: RowSource, indices: Sequence[int], renderer: PromptRenderer
) -> Iterator[tuple[RenderedPrompt, dict[str, object]]]:
    for index in indices[:ROWS_TRIED]:
        row = dict(rows[index])
        try:
            yield renderer.render(row, rows.row_id(index)), row
        except UserError:  # find_prompts reports it
            continue


def _said(answer: Any) -> str:
    """The answer as a completion would say it."""
    try:
        return accepted_answers(RewardSample("", answer=answer))[0]
    except ValueError:  # of a form that the user's own function reads
        return json.dumps(answer, ensure_ascii=False, default=str)


async def _score(
    config: RunConfig, rows: Sequence[tuple[RenderedPrompt, dict[str, object]]]
) -> dict[str, dict[str, Score]]:
    """Score up to four completions per row, as a group: the answer (also in a box, where a reward reads one), an empty
    text, and a demonstration. By row."""
    processor = PromptProcessor(config.model)
    wants_box = any(each.function == "boxed_match" for each in config.reward.functions)
    scorer, key = RewardScorer(config.reward.model_copy(update={"workers": 1})), config.data.target_key
    await scorer.start()
    try:
        scored: dict[str, dict[str, Score]] = {}
        for rendered, row in rows:
            said = _said(rendered.prompt.answer)
            boxed = {BOXED: f"\\boxed{{{said}}}"} if wants_box else {}
            completions = {"the answer": said, **boxed, NOTHING: ""}
            if row.get(key):
                completions[key] = str(row[key])
            samples = [
                sample_of(
                    rendered.prompt,
                    text,
                    rendered.blobs,
                    "stop",
                    num_tokens=len(processor.tokenize(text)) + 1,
                    max_tokens=config.data.max_response_length,
                )
                for text in completions.values()
            ]
            group = scorer.group(len(samples))
            scores = await asyncio.gather(*(group.score(i, sample) for i, sample in enumerate(samples)))
            scored[rendered.prompt.row_id] = dict(zip(completions, scores, strict=True))
        return scored
    finally:
        await scorer.close()
