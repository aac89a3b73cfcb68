"""A row becomes a prompt: chat messages with image placeholders, and the encoded images beside them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from asyncrl.config.sections import DataConfig
from asyncrl.data.chat import CHAT_TEXT, PARTS, chat_messages, marked_text, split_placeholders, unpacked
from asyncrl.data.images import content_hash, load_image_bytes, load_videos
from asyncrl.errors import UserError
from protocol.messages import ChatMessage, ContentPart, Prompt, TextPart, Video
from protocol.values import pack_values

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class RenderedPrompt:
    prompt: Prompt
    blobs: Mapping[str, bytes]
    """Encoded bytes of images and frames by content hash."""
    target: str = ""
    """Text of the row in `data.target_key`; empty where it has none."""


class PromptRenderer:
    def __init__(self, config: DataConfig):
        self._config = config
        self._template = _load_template(config.format_prompt)
        self._template_name = "data.format_prompt" if is_template(config.format_prompt) else config.format_prompt

    def render(self, row: Mapping[str, Any], row_id: str) -> RenderedPrompt:
        """Raises UserError naming the row for a bad image, message, template variable, or placeholder count."""
        config, own = self._config, self._config.prompt_columns
        row = unpacked(row, config)
        for column in row.keys() - {config.image_key, config.video_key}:
            half = _SURROGATE.search(json.dumps(row[column], ensure_ascii=False, skipkeys=True, default=str))
            if half is not None:
                raise UserError(
                    f"row {row_id}: column {column!r} has {half[0]!r}, half of a character (a surrogate): text that "
                    "was cut within an emoji, or decoded wrongly. Mend it, or leave the row out"
                )
        images = self._images(row, row_id)
        videos = load_videos(row.get(config.video_key), Path(config.image_dir or "."), row_id)
        messages = _placed(self._messages(row, row_id), "video", len(videos), config.video_key, row_id)
        messages = _placed(messages, "image", len(images), config.image_key, row_id)
        blobs = {content_hash(data): data for data in (*images, *(frame for video in videos for frame in video))}
        prompt = Prompt(
            row_id=row_id,
            messages=tuple(messages),
            image_hashes=tuple(map(content_hash, images)),
            videos=tuple(Video(frame_hashes=tuple(map(content_hash, v)), fps=config.video_fps) for v in videos),
            answer=self._answer(row, row_id),
            columns={name: self._carried(name, value, row_id) for name, value in row.items() if name not in own},
        )
        target = row.get(config.target_key)
        return RenderedPrompt(prompt, blobs, target if isinstance(target, str) else "")

    def _images(self, row: Mapping[str, Any], row_id: str) -> list[bytes]:
        value = row.get(self._config.image_key)
        if value is None:
            return []
        values = value if isinstance(value, list) else [value]
        # RowSource has made the paths absolute: the base matters to rows from elsewhere only.
        base = Path(self._config.image_dir or ".")
        return [load_image_bytes(item, base, f"row {row_id}, image {number}") for number, item in enumerate(values)]

    def _answer(self, row: Mapping[str, Any], row_id: str) -> Any:
        answer = row.get(self._config.answer_key)
        if isinstance(answer, float) and math.isnan(answer):
            return None  # as pandas writes a missing one
        return self._carried(self._config.answer_key, answer, row_id)

    def _carried(self, column: str, value: Any, row_id: str) -> Any:
        """The value, if it reaches the reward as it is. Raises UserError, which names the column."""
        try:
            pack_values(value)
        except (TypeError, ValueError, OverflowError) as error:
            setting = " (data.answer_key)" if column == self._config.answer_key else ""
            raise UserError(
                f"row {row_id}: column {column!r}{setting} cannot be brought to the reward: it has {error}. "
                "It may hold text, numbers, bytes, dates, times, durations, decimals, and lists and maps of them. "
                "Convert it in the file, or leave the column out"
            ) from error
        return value

    def _messages(self, row: Mapping[str, Any], row_id: str) -> list[ChatMessage]:
        config, content = self._config, row.get(self._config.prompt_key)
        column = f"column {config.prompt_key!r} (data.prompt_key)"
        if isinstance(content, str) and CHAT_TEXT.match(content):
            raise UserError(
                f"row {row_id}: {column} begins like a list of chat messages, {content[:60]!r}, and is no JSON. Write "
                "the list itself, or json.dumps() of it"
            )
        if content is None and self._template is not None:
            content = self._apply_template(None, row, row_id)  # the template makes the question of other columns
        elif isinstance(content, str):
            content = self._apply_template(content, row, row_id)
        if isinstance(content, str):
            messages = [ChatMessage(role="user", content=split_placeholders(content))]
        elif isinstance(content, list) and content:
            messages = self._asked_last(chat_messages(content, config, row_id), row, row_id)
        else:
            found = f"a {type(content).__name__}" if content else "empty"
            raise UserError(f"row {row_id}: {column} is {found}; it must be a string or a list of chat messages")
        if config.system_prompt:
            messages.insert(0, ChatMessage(role="system", content=(TextPart(text=config.system_prompt),)))
        if any(message.role == "system" for message in messages[1:]):
            raise UserError(
                f"row {row_id}: a system message comes first, and this prompt has one behind another message, or "
                "behind data.system_prompt. Leave one of them out, or make it a user's"
            )
        return messages

    def _asked_last(self, messages: list[ChatMessage], row: Mapping[str, Any], row_id: str) -> list[ChatMessage]:
        """Messages whose last turn of the user has gone through the template."""
        if self._template is None:
            return messages
        users = [number for number, message in enumerate(messages) if message.role == "user"]
        if not users:
            raise UserError(f"row {row_id}: {self._template_name} is for the last user's message, and there is none")
        last = messages[users[-1]]
        text = self._apply_template(marked_text(last.content), row, row_id)
        messages[users[-1]] = last.model_copy(update={"content": split_placeholders(text)})
        return messages

    def _apply_template(self, content: str | None, row: Mapping[str, Any], row_id: str) -> str:
        if self._template is None:
            return content or ""
        known = dict(row) if content is None else {**row, "content": content}
        try:
            return self._template.render(known)
        except jinja2.UndefinedError as error:
            if content is None and error.message == "'content' is undefined":
                raise UserError(
                    f"row {row_id}: there is nothing in column {self._config.prompt_key!r} (data.prompt_key), and the "
                    f"template {self._template_name} asks for it as `content`. Give the row one or leave it out"
                ) from error
            raise UserError(
                f"row {row_id}: the template {self._template_name} asks for a column that is not there: "
                f"{error.message}. Columns: {', '.join(sorted(row))}"
            ) from error
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise UserError(
                f"row {row_id}: the template {self._template_name} fails: {type(error).__name__}: {error}"
            ) from error


def _placed(messages: list[ChatMessage], kind: str, count: int, key: str, row_id: str) -> list[ChatMessage]:
    """Messages with one placeholder per image or video; without any, they go first in the first user message."""
    found = sum(part.type == kind for message in messages for part in message.content)
    if found == count:
        return messages
    if found:
        raise UserError(
            f"row {row_id}: {found} <{kind}> placeholder(s) in the prompt, {count} {kind}(s) in "
            f"column {key!r} or the parts of messages. Write one <{kind}> per {kind}, or none to put the {kind}s first"
        )
    first = next((i for i, message in enumerate(messages) if message.role == "user"), 0)
    user = messages[first]
    content: tuple[ContentPart, ...] = (*(PARTS[kind] for _ in range(count)), *user.content)
    return [*messages[:first], user.model_copy(update={"content": content}), *messages[first + 1 :]]


def _load_template(path: str) -> jinja2.Template | None:
    if not path:
        return None
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=False)
    try:
        return environment.from_string(template_text(path))
    except jinja2.TemplateSyntaxError as error:
        place = "" if is_template(path) else f"{path}, "
        raise UserError(f"data.format_prompt: {place}line {error.lineno}: {error.message}") from error


def template_text(format_prompt: str) -> str:
    """The template that `data.format_prompt` is, or that the file holds which it names; empty where it is."""
    if not format_prompt or is_template(format_prompt):
        return format_prompt
    file = Path(format_prompt)
    if not file.is_file():
        raise UserError(f"data.format_prompt is {format_prompt!r}, but there is no such file in {Path.cwd()}")
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"data.format_prompt: {file} is no UTF-8 text: {error}. Save it as UTF-8") from None


def is_template(format_prompt: str) -> bool:
    """Whether it is a template and no path of one."""
    return "{{" in format_prompt or "{%" in format_prompt
