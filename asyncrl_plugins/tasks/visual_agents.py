"""Agents that look, search and compute before they answer: DeepEyes' zoom, MAT's search and code, over several turns.

Each has one tool of the environment `tools`. A turn without a call is the answer; `reward.functions` score what it
says, and `paid_answer` pays `bonus` if the answer is right and a call before it had succeeded, as DeepEyes does (arXiv
2505.14362). A bonus for calls alone, as RLLaVA pays it, is earned by calling and saying anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from asyncrl.environments.interface import ToolError
from asyncrl.errors import UserError, field_problem
from asyncrl.rewards.builtin import accepted_answers
from asyncrl.rewards.sample import RewardSample
from asyncrl_plugins.tasks.completions import answer_text
from asyncrl_plugins.tasks.text_match import F1, exact, token_f1

SMALLEST_PX, LONGEST = 28, 100.0
"""A crop's shorter side in pixels, and how many times its longer side may be that (DeepEyes)."""


class AgentSettings(BaseModel):
    """Keys of `environment.config.settings`."""

    model_config = ConfigDict(extra="forbid")

    bonus: float = 1.2
    """Paid for a right answer behind a call that has succeeded."""
    right_from: float = Field(default=1.0, gt=0, le=1)
    """Token F1 from which an answer is right; 1: the same words."""
    enlarge_to: int = Field(default=0, ge=0)
    """Pixels of a crop's shorter side that smaller ones are enlarged to; 0: as it is."""
    url: str = ""
    """Address of the retrieval server, such as http://127.0.0.1:8000/retrieve."""
    passages: int = Field(default=4, gt=0)
    """Number of passages of each query."""
    passage_chars: int = Field(default=2000, gt=0)
    """Longest passage; the rest is cut."""
    deadline_s: float = Field(default=20.0, gt=0)
    """Deadline in seconds of one query."""


def answer_f1(sample: RewardSample, *, f1: F1 = "bag") -> dict[str, float]:
    """`answer`: token F1 of the answer block of the last turn, or of all that it says without one; `exact`: 1 for the
    same words. Of several references the best counts.

    A reference is text, or a row of DeepEyes' `reward_model` with its `ground_truth`.
    """
    given = answer_text(sample.completion)
    return {
        "answer": max(token_f1(given, reference, f1) for reference in _references(sample.answer, sample.row_id)),
        "exact": max(exact(given, reference) for reference in _references(sample.answer, sample.row_id)),
    }


def _references(answer: Any, row_id: str = "") -> Sequence[str]:
    given = answer.get("ground_truth") if isinstance(answer, dict) else answer
    return [answer_text(str(each)) for each in accepted_answers(RewardSample("", answer=given, row_id=row_id))]


def paid_answer(text: str, ctx: Any) -> float:
    """Bonus of an answer. `ctx.info`: accuracy, used (calls that had succeeded)."""
    settings = AgentSettings(**ctx.settings)
    accuracy = max(token_f1(answer_text(text), reference) for reference in _references(ctx.row["answer"]))
    ctx.info |= {"accuracy": accuracy, "used": ctx.answered}
    return settings.bonus * (accuracy >= settings.right_from and ctx.answered > 0)


async def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise UserError for a key that there is not, or a value that it does not take."""
    try:
        AgentSettings(**settings)
    except ValidationError as error:
        fields = AgentSettings.model_fields
        problems = (field_problem(detail, fields, "environment.config.settings.") for detail in error.errors())
        raise UserError("; ".join(problems)) from None


setattr(paid_answer, "check", check_settings)  # noqa: B010 - a function has no such field for a type checker


def image_zoom_in_tool(bbox_2d: list[float], label: str = "", image: int = 0, *, ctx: Any) -> Image.Image:
    """Zoom in on a part of an image.

    bbox_2d: [x1, y1, x2, y2] in pixels of the image, the top left corner first.
    label: name of the object in the box.
    image: number of the image, 0 is the first one.
    """
    shown = ctx.image(image)
    width, height = shown.size
    if len(bbox_2d) != 4:
        raise ToolError(f"bbox_2d has {len(bbox_2d)} numbers, expected [x1, y1, x2, y2]")
    left, top = max(0, int(bbox_2d[0])), max(0, int(bbox_2d[1]))
    right, bottom = min(width, int(bbox_2d[2])), min(height, int(bbox_2d[3]))
    short, long = sorted((right - left, bottom - top))
    if short < SMALLEST_PX or long > LONGEST * short:
        raise ToolError(
            f"the box {bbox_2d} has {right - left} x {bottom - top} pixels of the image's {width} x {height}: it "
            f"must have {SMALLEST_PX} each way at least, and no side over {LONGEST:g} times the other"
        )
    crop = shown.pixels.crop((left, top, right, bottom))
    scale = AgentSettings(**ctx.settings).enlarge_to / short
    return crop.resize((round(crop.width * scale), round(crop.height * scale))) if scale > 1 else crop


async def search(query: str, *, ctx: Any) -> str:
    """Search for passages.

    query: words, understood without the image.
    """
    # Passages of a retrieval server, `POST {queries, topk}` as Search-R1's (arXiv 2503.09516), whose results are
    # `{document: {contents}}`, `{contents}` or text. A server that does not answer is a failure of the environment.
    import aiohttp  # workers of other environments do without

    if not query.strip():
        raise ToolError("the query is empty")
    config = AgentSettings(**ctx.settings)
    asked = {"queries": [query.strip()], "topk": config.passages}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=config.deadline_s)) as session,
            session.post(config.url, json=asked) as answer,
        ):
            answer.raise_for_status()
            found = (await answer.json())["result"][0]
    except (TimeoutError, aiohttp.ClientError, KeyError, IndexError, TypeError, ValueError) as error:
        raise RuntimeError(f"the search at {config.url} failed: {error or type(error).__name__}") from error
    passages = [_passage(each)[: config.passage_chars] for each in found]
    return "\n".join(f"({number}) {text}" for number, text in enumerate(passages, 1)) or "nothing was found"


def _passage(found: Any) -> str:
    inner = found.get("document", found) if isinstance(found, dict) else found
    return str(inner.get("contents", inner) if isinstance(inner, dict) else inner).strip()
