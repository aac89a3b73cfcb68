"""Sample cards: which of the recorded samples a page shows, and each with its image, prompt and completions.

Good, bad, truncated and failed samples are chosen from the whole course of the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncrl.telemetry.jsonl import read_records
from asyncrl.telemetry.recorder import SAMPLES_FILE
from asyncrl_plugins.viewer.numbers import count
from asyncrl_plugins.viewer.recorded_run.run import Record, RecordedRun, number
from asyncrl_plugins.viewer.report.embedded_images import EmbeddedImage, EmbeddedImages
from asyncrl_plugins.viewer.report.markup import LABELS

PERIODS = 6
"""Parts of a run, of each of which the best and the worst group are shown."""
PER_STATUS = 3
STATUSES = ("truncated", "timed_out", "error")
CALL_ERROR = "call_error"
"""Label of a sample in which the policy called a tool wrongly."""
MAX_IMAGES = 4
MAX_COMPLETIONS = 8
OPEN_COMPLETIONS = 3
"""Completions of a card that are not folded."""
MAX_TURNS = 32
MAX_TOOLS = 40
"""Names to choose from; a policy that makes names up may have called any number of tools."""
COMPARED = ("text", "reward", "rewards", "status", "error", "length", "request", "turns")
"""Completions with equal values of these keys are shown once."""


@dataclass
class Choice:
    sample: Record
    labels: list[str] = field(default_factory=list)
    """Reasons for showing it: good, bad, alike, truncated, timed_out, error, call_error."""


@dataclass(frozen=True)
class Chosen:
    choices: list[Choice]
    """The best and the worst of each period, then samples by status."""
    recorded: int
    """Number of samples in the file."""
    broken: int


def choose(file: Path, first: int, last: int) -> Chosen:
    """Choose samples of the file in one pass, which keeps no more than what may be shown. Raises OSError."""
    kept: dict[str, dict[int, tuple[float, Record]]] = {label: {} for label in LABELS}
    recorded = broken = 0
    for sample in _samples(file):
        if sample is None:
            broken += 1
            continue
        recorded += 1
        reasons = {str(c.get("status")) for c in completions_of(sample)} & set(STATUSES)
        if any(kind for c in completions_of(sample) for _, kind in _calls(c)):
            reasons.add(CALL_ERROR)
        scores = dict.fromkeys(reasons, -float(recorded))
        if rewards := _rewards(sample):
            scores |= {"good": fmean(rewards), "bad": -fmean(rewards)}
        period = min(PERIODS - 1, max(0, int((sample["step"] - first) * PERIODS / (last - first + 1))))
        for label, score in scores.items():
            if period not in kept[label] or score >= kept[label][period][0]:
                kept[label][period] = (score, sample)
    labelled: list[tuple[Record, str]] = []
    for period, (score, sample) in sorted(kept["good"].items()):
        differs = -kept["bad"][period][0] < score
        labelled.append((sample, "good" if differs else "alike"))
        if differs:
            labelled.append((kept["bad"][period][1], "bad"))
    labelled += [
        (sample, status)
        for status in (*STATUSES, CALL_ERROR)
        for sample in _spread([s for _, s in kept[status].values()])
    ]
    chosen: dict[int, Choice] = {}
    for sample, label in labelled:
        chosen.setdefault(id(sample), Choice(sample)).labels.append(label)
    return Chosen(list(chosen.values()), recorded, broken)


def completions_of(sample: Record) -> list[dict[str, Any]]:
    completions = sample.get("completions")
    return [c for c in completions if isinstance(c, dict)] if isinstance(completions, list) else []


def _samples(file: Path) -> Iterator[Record | None]:
    """Yield samples, and None for an invalid line."""
    with file.open("rb") as lines:
        for sample in read_records(lines):
            yield sample if sample is not None and number(sample.get("step")) is not None else None


def _spread(samples: list[Record]) -> list[Record]:
    """Choose the first, the last, and some between them."""
    places = {i * (len(samples) - 1) // (PER_STATUS - 1) for i in range(PER_STATUS)}
    return [samples[i] for i in sorted(places)] if samples else []


def sample_cards(run: RecordedRun) -> dict[str, Any]:
    """Choose samples, and return what the template shows of them; `problem` says why there are none."""
    steps = [int(step["step"]) for step in run.steps]
    try:
        chosen = choose(run.path / SAMPLES_FILE, min(steps, default=0), max(steps, default=0))
    except FileNotFoundError:
        return {"problem": f"There is no {SAMPLES_FILE}: trainer.samples_per_step is 0, or no step was made."}
    except OSError as problem:
        return {"problem": f"{SAMPLES_FILE} cannot be read ({problem.strerror})."}
    if not chosen.choices:
        return {"problem": f"{SAMPLES_FILE} holds no sample."}
    images = EmbeddedImages(run.path)
    rewards = [reward for choice in chosen.choices for reward in _rewards(choice.sample)]
    scale = min(rewards, default=0.0), max(rewards, default=0.0)
    shown = [c for choice in chosen.choices for c in completions_of(choice.sample)]
    calls = [call for completion in shown for call in _calls(completion)]
    broken = f", {count(chosen.broken, 'line')} could not be read" if chosen.broken else ""
    return {
        "problem": "",
        "about": f"{len(chosen.choices)} of {chosen.recorded:,} recorded groups: the best and the worst of each sixth "
        f"of the run, and such as were cut off, failed or called a tool wrongly{broken}.",
        "ends": sorted({str(completion["end"]) for completion in shown if completion.get("end")}),
        "tools": sorted({name for name, _ in calls if name})[:MAX_TOOLS],
        "call_errors": sorted({kind for _, kind in calls if kind}),
        "labels": [label for label in LABELS if any(label in choice.labels for choice in chosen.choices)],
        "cards": [_card(choice, images, scale) for choice in chosen.choices],
    }


def _card(choice: Choice, images: EmbeddedImages, scale: tuple[float, float]) -> dict[str, Any]:
    """Show equal completions once, and fold what would make the card long."""
    sample, completions, rewards = choice.sample, completions_of(choice.sample), _rewards(choice.sample)
    same: dict[str, list[Record]] = {}
    for completion in sorted(completions, key=lambda c: _rank(c, choice.labels)):
        same.setdefault(json.dumps([completion.get(key) for key in COMPARED], sort_keys=True), []).append(completion)
    shown = list(same.values())[:MAX_COMPLETIONS]
    media = [digest for key in ("images", "videos") if isinstance(sample.get(key), list) for digest in sample[key]]
    return {
        "sample": sample,
        "labels": choice.labels,
        "mean": fmean(rewards) if rewards else None,
        "images": [images.get(digest) for digest in media[:MAX_IMAGES]],
        "more_images": max(0, len(media) - MAX_IMAGES),
        "opening": _shown(sample.get("opening"), images),
        "completions": [
            (
                alike[0] | {"chat": _chat(alike[0], images), "calls": json.dumps(_calls(alike[0]))},
                len(alike),
                _tone(number(alike[0].get("reward")), scale),
            )
            for alike in shown
        ],
        "open": OPEN_COMPLETIONS,
        "left_out": len(completions) - sum(map(len, shown)),
    }


def _chat(completion: Record, images: EmbeddedImages) -> list[dict[str, Any]]:
    """The turns of a conversation, as far as they can be read; none of other completions."""
    turns = completion.get("turns")
    return [
        {
            **{name: turn.get(name) for name in ("text", "reward", "info", "context")},
            "versions": turn["versions"] if isinstance(turn.get("versions"), list) else [],
            "calls": [call for call in _list(turn.get("calls")) if isinstance(call, dict)],
            "shown": _shown(turn.get("shown"), images),
        }
        for turn in _list(turns)[:MAX_TURNS]
        if isinstance(turn, dict)
    ]


def _calls(completion: Record) -> list[tuple[str, str]]:
    """Tool of each call of a conversation, and the kind of its error; empty where it was right."""
    turns = [turn for turn in _list(completion.get("turns")) if isinstance(turn, dict)]
    calls = [call for turn in turns for call in _list(turn.get("calls")) if isinstance(call, dict)]
    return [(str(call.get("name") or ""), str(call.get("error_kind") or "")) for call in calls]


def _shown(messages: Any, images: EmbeddedImages) -> list[tuple[str, list[Any]]]:
    """Role and parts of each message: texts, and embedded images."""
    return [
        (str(message.get("role")), [_part(part, images) for part in _list(message.get("parts"))])
        for message in _list(messages)
        if isinstance(message, dict)
    ]


def _part(part: Any, images: EmbeddedImages) -> str | EmbeddedImage:
    return images.get(part.get("image")) if isinstance(part, dict) else str(part)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _rewards(sample: Record) -> list[float]:
    return [reward for c in completions_of(sample) if (reward := number(c.get("reward"))) is not None]


def _rank(completion: Record, labels: list[str]) -> tuple[bool, float]:
    """Sort the completions that the card is shown for first, then by reward."""
    reward = number(completion.get("reward"))
    return completion.get("status") not in labels, -reward if reward is not None else float("inf")


def _tone(reward: float | None, scale: tuple[float, float]) -> str:
    """Name the third of the range that a reward is in."""
    low, high = scale
    if reward is None or high <= low:
        return "none"
    place = (reward - low) / (high - low)
    return "low" if place < 1 / 3 else "high" if place > 2 / 3 else "middle"
