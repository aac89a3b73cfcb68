"""Sample cards: which of the recorded samples a page shows, and each with its image, prompt and completions.

Good, bad, truncated and failed samples are chosen from the whole course of the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncrl.tools.report.embedded_images import EmbeddedImage, EmbeddedImages
from asyncrl.tools.report.markup import count, figure, text
from asyncrl.tools.report.recorded_run import SAMPLES_FILE, Record, RecordedRun, number

PERIODS = 6
"""Parts of a run, of each of which the best and the worst group are shown."""
PER_STATUS = 3
STATUSES = ("truncated", "timed_out", "error")
MAX_IMAGES = 4
MAX_COMPLETIONS = 8
FOLDED_FROM = 420
"""Characters after which a text is folded."""
MAX_CHARACTERS = 8000
MAX_OPEN_CHARACTERS = 1300
"""Characters of all completions of a card that are not folded; two are shown in any case."""
COMPARED = ("text", "reward", "rewards", "status", "error", "length")
"""Completions with equal values of these keys are shown once."""
LABELS = {
    "good": "best of its time",
    "bad": "worst of its time",
    "truncated": "truncated",
    "timed_out": "timed out",
    "error": "error",
}
MAGNIFIED_BELOW = 200
"""Pixels of the longer side below which an image is magnified."""


@dataclass
class Choice:
    sample: Record
    labels: list[str] = field(default_factory=list)
    """Reasons for showing it: good, bad, truncated, timed_out, error."""


@dataclass(frozen=True)
class Chosen:
    choices: list[Choice]
    """The best and the worst of each period, then samples by status."""
    recorded: int
    """Number of samples in the file."""
    broken: int


def choose(file: Path, first: int, last: int) -> Chosen:
    """Choose samples of the file in one pass, which keeps no more than what may be shown. Raises OSError."""
    best: dict[int, tuple[float, Record]] = {}
    worst: dict[int, tuple[float, Record]] = {}
    by_status: dict[str, dict[int, Record]] = {status: {} for status in STATUSES}
    recorded = broken = 0
    for sample in _samples(file):
        if sample is None:
            broken += 1
            continue
        recorded += 1
        period = _period(sample["step"], first, last)
        if rewards := _rewards(sample):
            mean = fmean(rewards)
            if period not in best or mean >= best[period][0]:
                best[period] = (mean, sample)
            if period not in worst or mean <= worst[period][0]:
                worst[period] = (mean, sample)
        for status in {str(c.get("status")) for c in completions_of(sample)} & by_status.keys():
            by_status[status].setdefault(period, sample)
    chosen: dict[int, Choice] = {}
    found: list[tuple[Record, str]] = []
    for period in sorted(best):
        found.append((best[period][1], "good"))
        if worst[period][0] < best[period][0]:
            found.append((worst[period][1], "bad"))
    failed = [(sample, status) for status in STATUSES for sample in _spread(list(by_status[status].values()))]
    for sample, label in [*found, *failed]:
        chosen.setdefault(id(sample), Choice(sample)).labels.append(label)
    return Chosen(list(chosen.values()), recorded, broken)


def completions_of(sample: Record) -> list[dict[str, Any]]:
    completions = sample.get("completions")
    return [c for c in completions if isinstance(c, dict)] if isinstance(completions, list) else []


def _samples(file: Path) -> Iterator[Record | None]:
    """Yield samples, and None for a line that is none. An unfinished last line is left out."""
    with file.open("rb") as lines:
        for line in lines:
            try:
                sample = json.loads(line)
            except (ValueError, RecursionError):
                if line.endswith(b"\n"):
                    yield None
                continue
            yield sample if isinstance(sample, dict) and number(sample.get("step")) is not None else None


def _period(step: float, first: int, last: int) -> int:
    return min(PERIODS - 1, max(0, int((step - first) * PERIODS / (last - first + 1))))


def _spread(samples: list[Record]) -> list[Record]:
    """Choose the first, the last, and some between them."""
    places = {i * (len(samples) - 1) // (PER_STATUS - 1) for i in range(PER_STATUS)}
    return [samples[i] for i in sorted(places)] if samples else []


# --- cards -----------------------------------------------------------------------------------------


def sample_cards(run: RecordedRun) -> str:
    """Show the chosen samples as HTML."""
    steps = [int(step["step"]) for step in run.steps]
    try:
        chosen = choose(run.path / SAMPLES_FILE, min(steps, default=0), max(steps, default=0))
    except FileNotFoundError:
        return f'<p class="empty">There is no {SAMPLES_FILE}: trainer.samples_per_step is 0, or no step was made.</p>'
    except OSError as problem:
        return f'<p class="empty">{SAMPLES_FILE} cannot be read ({text(problem.strerror)}).</p>'
    if not chosen.choices:
        return f'<p class="empty">{SAMPLES_FILE} holds no sample.</p>'
    images = EmbeddedImages(run.path)
    scale = _scale(chosen.choices)
    cards = "".join(_card(choice, images, scale) for choice in chosen.choices)
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
    """Return the lowest and the highest reward of the chosen samples."""
    rewards = [reward for choice in choices for reward in _rewards(choice.sample)]
    return min(rewards, default=0.0), max(rewards, default=0.0)


def _card(choice: Choice, images: EmbeddedImages, scale: tuple[float, float]) -> str:
    sample = choice.sample
    completions = completions_of(sample)
    rewards = _rewards(sample)
    mean = fmean(rewards) if rewards else None
    tags = "".join(f'<span class="tag t-{label}">{LABELS[label]}</span>' for label in choice.labels)
    rows = _completions(completions, choice.labels, scale)
    answer = sample.get("answer")
    answered = f'<p class="answer"><span>answer</span> {_long(answer)}</p>' if answer not in (None, "") else ""
    return (
        f'<article class="card" data-labels="{" ".join(choice.labels)}"><header><b>step {sample["step"]:.0f}</b>{tags}'
        f'<span class="mean">mean reward {figure(mean)}</span><span class="row">{text(sample.get("row_id", ""))}</span>'
        f'</header><div class="asked">{_images(sample, images)}<div><p class="prompt">'
        f'{_long(sample.get("prompt", ""))}</p>{answered}</div></div><div class="completions">{rows}</div></article>'
    )


def _completions(completions: Sequence[Record], labels: list[str], scale: tuple[float, float]) -> str:
    """Show equal completions once, and fold what would make the card long."""
    same: dict[str, list[Record]] = {}
    for completion in sorted(completions, key=lambda c: _rank(c, labels)):
        same.setdefault(json.dumps([completion.get(key) for key in COMPARED], sort_keys=True), []).append(completion)
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
    """Sort the completions that the card is shown for first, then by reward."""
    reward = number(completion.get("reward"))
    return completion.get("status") not in labels, -reward if reward is not None else float("inf")


def _images(sample: Record, images: EmbeddedImages) -> str:
    named = [*_list(sample.get("images")), *_list(sample.get("videos"))]
    if not named:
        return ""
    shown = "".join(_image(images.get(digest)) for digest in named[:MAX_IMAGES])
    more = f'<span class="none">{len(named) - MAX_IMAGES} more</span>' if len(named) > MAX_IMAGES else ""
    return f'<div class="images">{shown}{more}</div>'


def _image(image: EmbeddedImage) -> str:
    if not image.uri:
        return f'<span class="none">no image: {text(image.problem)}</span>'
    small = max(image.width, image.height) < MAGNIFIED_BELOW
    size = f"{image.width} × {image.height}"
    return f'<img class="{"small" if small else "large"}" src="{image.uri}" alt="{size}" title="{size} pixels">'


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
    failed = f'<p class="error">{_long(error)}</p>' if error else ""
    alike = f'<span class="times">{times} times</span>' if times > 1 else ""
    return (
        f'<div class="completion"><span class="reward r-{_tone(reward, scale)}">{figure(reward)}</span><div>'
        f'<div class="wrote">{_long(completion.get("text", "")) or "<i>nothing</i>"}</div>{failed}'
        f'<p class="facts">{chip}{split}<span>{tokens}</span>{alike}</p></div></div>'
    )


def _tone(reward: float | None, scale: tuple[float, float]) -> str:
    """Name the third of the range that a reward is in."""
    low, high = scale
    if reward is None or high <= low:
        return "none"
    place = (reward - low) / (high - low)
    return "low" if place < 1 / 3 else "high" if place > 2 / 3 else "middle"


def _long(value: Any) -> str:
    """Escape text; fold it if it is long, and cut it if it is very long."""
    words = str(value)
    cut = f"… [{len(words) - MAX_CHARACTERS:,} more characters]" if len(words) > MAX_CHARACTERS else ""
    if len(words) <= FOLDED_FROM * 1.3:
        return text(words)
    head, rest = text(words[:FOLDED_FROM]), text(words[FOLDED_FROM:MAX_CHARACTERS] + cut)
    return f"{head}<details><summary>{len(words) - FOLDED_FROM:,} more characters</summary>{rest}</details>"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
