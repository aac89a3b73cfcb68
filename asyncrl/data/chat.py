"""Chat messages as rows of data sets hold them: forms of parts, images and videos of their own, calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from asyncrl.config.sections import DataConfig
from asyncrl.errors import UserError
from protocol.messages import ChatMessage, ContentPart, ImagePart, TextPart, VideoPart
from protocol.nesting import read_json

PLACEHOLDER = re.compile(r"<(image|video)>")
PARTS: dict[str, ImagePart | VideoPart] = {"image": ImagePart(), "video": VideoPart()}
CHAT_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content|from)["']\s*:""")
"""Beginning of a list of messages that is written as text."""
_KINDS = {
    **dict.fromkeys(("text", "input_text"), "text"),
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("video", "video_url"), "video"),
}
"""Kinds of parts by their `type`, or by the key of a part without one."""
_HOLDERS = {"image", "image_url", "video", "video_url", "path", "url", "base64", "bytes", "source"}
"""Keys of a part under which an image or a video is."""
_LEFT = {"type", "index", "detail", "cache_control"}
"""Keys of a part that change nothing, or are looked at elsewhere."""


def unpacked(row: Mapping[str, Any], config: DataConfig) -> dict[str, Any]:
    """The row with a list of messages for the JSON text of one, and with images and videos that the parts of messages
    hold in the columns of images and videos, in their order.

    What cannot be told, such as images in both places, stays as it is: `chat_messages` refuses it.
    """
    messages = _listed(row.get(config.prompt_key), CHAT_TEXT)
    if not isinstance(messages, list):
        return dict(row)
    for kind, key in (("image", config.image_key), ("video", config.video_key)):
        held = [own for part in _parts_of(messages) if (own := _held(part, kind)) is not None]
        if held and not row.get(key):
            row = {**row, key: held}
            messages = [_without_held(message, kind) for message in messages]
    return {**row, config.prompt_key: messages}


def chat_messages(messages: Sequence[Any], config: DataConfig, row_id: str) -> list[ChatMessage]:
    """Messages of an unpacked row. Raises UserError naming the row for what would be shown otherwise than it is."""
    read = [_message(message, config, row_id) for message in messages]
    for kind in PARTS:
        named = [part.get("index") for part in _parts_of(messages) if _kind(part) == kind]
        if any(number is not None for number in named) and named != list(range(len(named))):
            raise UserError(
                f"row {row_id}: the parts of its messages name {kind}s of the column in the order {named}. Put the "
                "column in the order of the parts"
            )
    if read and read[-1].role == "assistant":
        raise UserError(
            f"row {row_id}: the prompt ends with the assistant's turn {marked_text(read[-1].content)[:60]!r}, which "
            "would be closed before the policy begins its own. Leave it out; an answer to learn from belongs in the "
            f"column {config.target_key!r} (data.target_key)"
        )
    return read


def marked_text(parts: Sequence[ContentPart]) -> str:
    """Text of a message's parts, with `<image>` and `<video>` where they stand."""
    return "".join(part.text if part.type == "text" else f"<{part.type}>" for part in parts)


def split_placeholders(text: str) -> tuple[ContentPart, ...]:
    """Cut the text at every `<image>` and `<video>`; empty pieces are left out."""
    parts: list[ContentPart] = []
    for index, piece in enumerate(PLACEHOLDER.split(text)):
        if index % 2:  # what the pattern's group has caught
            parts.append(PARTS[piece])
        elif piece:
            parts.append(TextPart(text=piece))
    return tuple(parts)


def _listed(value: Any, begins: re.Pattern[str]) -> Any:
    """The list in JSON text that begins like one; any other value as it is, such as text that is cut off."""
    if isinstance(value, str) and begins.match(value):
        with suppress(ValueError):
            return read_json(value)
    return value


# --- messages --------------------------------------------------------------------------------------


def _message(message: Any, config: DataConfig, row_id: str) -> ChatMessage:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("system", "user", "assistant", "tool"):
        raise UserError(f"row {row_id}: a chat message has role {role!r}; use system, user, assistant or tool")
    where = f"row {row_id}: the {role} message"
    others = {key: each for key, each in message.items() if each is not None and key not in ("role", "content")}
    if "function_call" in others:
        raise UserError(f"{where} has a function_call, which chat templates do not read. Write tool_calls, a list")
    calls = _listed(others.pop("tool_calls", []), re.compile(r"\s*\["))
    if not isinstance(calls, list):
        raise UserError(f"{where} has tool_calls of type {type(calls).__name__}; they must be a list")
    calls = [_call(call, where) for call in calls]
    try:
        json.dumps(others)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} has {', '.join(others)}, which no chat template reads: {error}") from None
    content = message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    elif content is None and calls:
        content = []
    if not isinstance(content, list):
        raise UserError(
            f"{where} has a content of type {type(content).__name__}; it must be a string or a list of parts, and may "
            "be null beside tool_calls"
        )
    parts = tuple(read for part in content for read in _part(part, config, where))
    return ChatMessage(role=role, content=parts, others=others | ({"tool_calls": calls} if calls else {}))


def _call(call: Any, where: str) -> dict[str, Any]:
    """A call of a tool as chat templates read it: its function's arguments are a map, which OpenAI has as JSON text."""
    given = {key: value for key, value in call.items() if value is not None} if isinstance(call, Mapping) else {}
    function = given.pop("function", None) or {key: given.pop(key, None) for key in ("name", "arguments")}
    name, arguments = (function.get(key) if isinstance(function, Mapping) else None for key in ("name", "arguments"))
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = read_json(arguments or "{}")
    if not isinstance(name, str) or not isinstance(arguments, Mapping | None):
        raise UserError(
            f"{where} has the tool call {str(call)[:80]!r}; write "
            '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
        )
    return {"type": "function", **given, "function": {"name": name, "arguments": dict(arguments or {})}}


# --- parts -----------------------------------------------------------------------------------------


def _part(part: Any, config: DataConfig, where: str) -> tuple[ContentPart, ...]:
    """The placeholder of an image or a video; or text, in which `<image>` and `<video>` are some, too."""
    kind = _kind(part)
    if kind is None or (kind == "text" and any(part.get(key) is not None for key in _HOLDERS)):
        raise UserError(
            f"{where} has the part {str(part)[:80]!r}; use "
            '{"type": "text", "text": ...}, {"type": "image"} or {"type": "video"}'
        )
    if kind == "text":
        text = part.get("text")
        return split_placeholders("" if text is None else str(text))
    if _held(part, kind) is not None:
        setting = f"data.{kind}_key"
        raise UserError(
            f"{where} has a part with its own {kind}, and column {getattr(config, f'{kind}_key')!r} ({setting}) holds "
            f"some for the same prompt. Keep one of them: leave the column out, set {setting}= (nothing), or write "
            f'{{"type": "{kind}"}} in the messages'
        )
    if unread := sorted(_filled(part)):
        raise UserError(
            f"{where} has the part {str(part)[:80]!r}, and of an {kind} {', '.join(map(repr, unread))} cannot be read "
            "there. Sizes are model.min_pixels and model.max_pixels, frames per second data.video_fps; leave the key "
            "out"
        )
    return (PARTS[kind],)


def _parts_of(messages: Sequence[Any]) -> list[Any]:
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return [part for content in contents if isinstance(content, list) for part in content]


def _without_held(message: Any, kind: str) -> Any:
    """The message with placeholders for the parts that hold what they show."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    parts = [part if _held(part, kind) is None else {"type": kind} for part in message["content"]]
    return {**message, "content": parts}


def _kind(part: Any) -> str | None:
    """`text`, `image` or `video`; None for any other part."""
    if not isinstance(part, Mapping):
        return None
    given = part.get("type") or next((key for key in part if key in _KINDS and part[key] is not None), None)
    return _KINDS.get(given) if isinstance(given, str) else None


def _filled(part: Mapping[str, Any]) -> dict[str, Any]:
    """Filled keys of a part beside its type. A table fills keys that other parts have with null."""
    return {key: value for key, value in part.items() if value is not None and key not in _LEFT and value != ""}


def _held(part: Any, kind: str) -> Any:
    """The image or video of a part of this kind, as a column would have it; None for a placeholder, and where it cannot
    be told."""
    if _kind(part) != kind or not (filled := _filled(part)) or not filled.keys() <= _HOLDERS:
        return None
    if filled.keys() <= {"bytes", "path"}:
        return filled
    (key, value), *more = filled.items()
    if more:
        return None
    if isinstance(value, Mapping) and ("url" in value or "data" in value):
        key, value = ("url", value["url"]) if value.get("url") else ("base64", value["data"])
    is_bare = key == "base64" and isinstance(value, str) and not value.startswith("data:")
    return f"data:;base64,{value}" if is_bare else value
