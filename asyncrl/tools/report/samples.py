"""Samples as cards: what was shown, what was asked, and what each completion got for its answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from asyncrl.tools.report.markup import count, figure, text
from asyncrl.tools.report.pictures import Picture, Pictures
from asyncrl.tools.report.run import SAMPLES_FILE, Record, Run, number
from asyncrl.tools.report.sample_choice import Choice, choose, completions_of

MAX_IMAGES = 4
MAX_COMPLETIONS = 8
FOLDED_FROM = 420
"""Characters: a longer text is folded after as many."""
MAX_CHARACTERS = 8000
MAX_OPEN_CHARACTERS = 1300
"""Of the completions of one card that are not folded; two are shown in any case."""
TOLD = ("text", "reward", "rewards", "status", "error", "length")
"""Completions that agree in these are shown once."""
LABELS = {
    "good": "best of its time",
    "bad": "worst of its time",
    "truncated": "truncated",
    "timed_out": "timed out",
    "error": "error",
}
MAGNIFIED_BELOW = 200
"""Pixels: a smaller image is shown larger, with its pixels as they are."""


def samples(run: Run) -> str:
    """HTML; a sentence where there are none."""
    steps = [int(step["step"]) for step in run.steps]
    try:
        chosen = choose(run.path / SAMPLES_FILE, min(steps, default=0), max(steps, default=0))
    except FileNotFoundError:
        return f'<p class="empty">There is no {SAMPLES_FILE}: trainer.samples_per_step is 0, or no step was made.</p>'
    except OSError as problem:
        return f'<p class="empty">{SAMPLES_FILE} cannot be read ({text(problem.strerror)}).</p>'
    if not chosen.choices:
        return f'<p class="empty">{SAMPLES_FILE} holds no sample.</p>'
    pictures = Pictures(run.path)
    scale = _scale(chosen.choices)
    cards = "".join(_card(choice, pictures, scale) for choice in chosen.choices)
    broken = f", {count(chosen.broken, 'line')} could not be read" if chosen.broken else ""
    about = (
        f"{len(chosen.choices)} of {chosen.recorded:,} recorded groups: the best and the worst of each sixth of the "
        f"run, and such as were cut off or failed{broken}."
    )
    present = [label for label in LABELS if any(label in choice.labels for choice in chosen.choices)]
    buttons = "".join(f'<button data-filter="{label}">{LABELS[label]}</button>' for label in present)
    filters = f'<p class="filters"><button data-filter="" class="on">all</button>{buttons}</p>'
    return f'<p class="about">{about}</p>{filters}<div class="cards">{cards}</div>'


def _rewards(sample: Record) -> list[float]:
    return [reward for c in completions_of(sample) if (reward := number(c.get("reward"))) is not None]


def _scale(choices: Sequence[Choice]) -> tuple[float, float]:
    """Lowest and highest reward of all that is shown."""
    rewards = [reward for choice in choices for reward in _rewards(choice.sample)]
    return min(rewards, default=0.0), max(rewards, default=0.0)


def _card(choice: Choice, pictures: Pictures, scale: tuple[float, float]) -> str:
    sample = choice.sample
    completions = completions_of(sample)
    rewards = _rewards(sample)
    mean = sum(rewards) / len(rewards) if rewards else None
    tags = "".join(f'<span class="tag t-{label}">{LABELS[label]}</span>' for label in choice.labels)
    rows = _completions(completions, choice.labels, scale)
    answer = sample.get("answer")
    told = f'<p class="answer"><span>answer</span> {_long(answer)}</p>' if answer not in (None, "") else ""
    return (
        f'<article class="card" data-labels="{" ".join(choice.labels)}"><header><b>step {sample["step"]:.0f}</b>{tags}'
        f'<span class="mean">mean reward {figure(mean)}</span><span class="row">{text(sample.get("row_id", ""))}</span>'
        f'</header><div class="asked">{_images(sample, pictures)}<div><p class="prompt">'
        f'{_long(sample.get("prompt", ""))}</p>{told}</div></div><div class="completions">{rows}</div></article>'
    )


def _completions(completions: Sequence[Record], labels: list[str], scale: tuple[float, float]) -> str:
    """Alike ones once; what would make the card long is folded."""
    same: dict[str, list[Record]] = {}
    for completion in sorted(completions, key=lambda c: _rank(c, labels)):
        same.setdefault(json.dumps([completion.get(key) for key in TOLD], sort_keys=True), []).append(completion)
    shown = list(same.values())[:MAX_COMPLETIONS]
    rows = [_completion(alike[0], len(alike), scale) for alike in shown]
    lengths = accumulate(min(FOLDED_FROM, len(str(alike[0].get("text", "")))) for alike in shown)
    fit = max(2, sum(length <= MAX_OPEN_CHARACTERS for length in lengths))
    folded = f"<summary>{count(len(rows) - fit, 'more completion')}</summary>{''.join(rows[fit:])}"
    more = len(completions) - sum(len(alike) for alike in shown)
    return (
        "".join(rows[:fit])
        + (f"<details>{folded}</details>" if rows[fit:] else "")
        + (f'<p class="note">and {more:,} that are not on this page</p>' if more else "")
    )


def _rank(completion: Record, labels: list[str]) -> tuple[bool, float]:
    """What the card is shown for comes first, then the best."""
    reward = number(completion.get("reward"))
    return completion.get("status") not in labels, -reward if reward is not None else float("inf")


def _images(sample: Record, pictures: Pictures) -> str:
    named = [*_list(sample.get("images")), *_list(sample.get("videos"))]
    if not named:
        return ""
    shown = "".join(_image(pictures.get(digest)) for digest in named[:MAX_IMAGES])
    more = f'<span class="none">{len(named) - MAX_IMAGES} more</span>' if len(named) > MAX_IMAGES else ""
    return f'<div class="images">{shown}{more}</div>'


def _image(picture: Picture) -> str:
    if not picture.uri:
        return f'<span class="none">no image: {text(picture.problem)}</span>'
    small = max(picture.width, picture.height) < MAGNIFIED_BELOW
    size = f"{picture.width} × {picture.height}"
    return f'<img class="{"small" if small else "large"}" src="{picture.uri}" alt="{size}" title="{size} pixels">'


def _completion(completion: Record, times: int, scale: tuple[float, float]) -> str:
    reward = number(completion.get("reward"))
    rewards = completion.get("rewards")
    parts = rewards if isinstance(rewards, dict) else {}
    split = " ".join(f"{text(name)} <b>{figure(number(value))}</b>" for name, value in list(parts.items())[:8])
    status = str(completion.get("status", ""))
    chip = f'<span class="tag t-{status}">{LABELS[status]}</span>' if status in LABELS else ""
    length = number(completion.get("length"))
    tokens = count(round(length), "token") if length is not None else ""
    error = completion.get("error")
    told = f'<p class="error">{_long(error)}</p>' if error else ""
    alike = f'<span class="times">{times} times</span>' if times > 1 else ""
    return (
        f'<div class="completion"><span class="reward r-{_tone(reward, scale)}">{figure(reward)}</span><div>'
        f'<div class="wrote">{_long(completion.get("text", "")) or "<i>nothing</i>"}</div>{told}'
        f'<p class="facts">{chip}{split}<span>{tokens}</span>{alike}</p></div></div>'
    )


def _tone(reward: float | None, scale: tuple[float, float]) -> str:
    """Which third of the range it is in."""
    low, high = scale
    if reward is None or high <= low:
        return "none"
    place = (reward - low) / (high - low)
    return "low" if place < 1 / 3 else "high" if place > 2 / 3 else "middle"


def _long(value: Any) -> str:
    """Escaped; what is long is folded, what is very long is cut."""
    words = str(value)
    cut = f"… [{len(words) - MAX_CHARACTERS:,} more characters]" if len(words) > MAX_CHARACTERS else ""
    if len(words) <= FOLDED_FROM * 1.3:
        return text(words)
    head, rest = text(words[:FOLDED_FROM]), text(words[FOLDED_FROM:MAX_CHARACTERS] + cut)
    return f"{head}<details><summary>{len(words) - FOLDED_FROM:,} more characters</summary>{rest}</details>"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
