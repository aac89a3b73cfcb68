"""The bridge between two turns: tokens that close what the model has said, show it the answer, and open its next turn.

Tokens are the truth. The prompt of a later turn is all tokens before it, verbatim, and then the bridge; nothing that
was sampled is decoded and tokenised again. The bridge is derived from the model folder's chat template: a conversation
of a fixed question, a fixed answer and the new messages is rendered, and what stands behind that answer is the bridge.
Rollout server and learner make it of the same messages and images, and the learner compares.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Literal

import numpy as np

from asyncrl.data.images import content_hash
from asyncrl.environments.interface import Start
from asyncrl.environments.observation import Message, Observation
from asyncrl.errors import UserError
from asyncrl.processing.chat_template import ASKED, SAID, SHOWN, said
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.processor import PromptProcessor
from asyncrl.rewards.sample import plain_message
from protocol.messages import ChatMessage, ContentPart, ImagePart, Prompt, TextPart

_Rendered = dict[str, Any]
"""A message as chat templates take it: role, and a list of parts."""


class TurnBridge:
    """Makes bridges for one model folder. Any thread may use it."""

    def __init__(self, processor: PromptProcessor, stop_token_ids: Sequence[int]):
        """Raises UserError, with the reason, for a chat template of which no bridge can be derived."""
        self.processor = processor
        self._reserved = _reserved_texts(processor)
        self._close = self._text_behind([], add_generation_prompt=False)
        self._close_id = self._check_close(stop_token_ids)
        self._tools_as: Literal["tool", "user"] = "tool" if self._shows("tool") else "user"
        if not self._shows("user"):
            raise self._refused("it does not show what a user says after a turn of the assistant")
        self._images_in = next((role for role in (self._tools_as, "user") if self._shows(role, image=True)), None)
        self._check_history()
        self._counts_tools = self._tools_as == "tool" and self._check_tools()

    def measure(self, last_token: int, observation: Observation, *, after_tools: bool = False) -> EncodedPrompt:
        """The tokens that follow a turn that ended with `last_token`, and lead to the next one.

        What closes the turn is left out where the model has sampled it. Text of the observation that the model's
        template reserves (`<|im_end|>`, an image placeholder) is written apart, so that it stays text. `after_tools`:
        results of tools were shown before this turn.

        Raises UserError for images that the model cannot read.
        """
        rendered = self._rendered(observation, after_tools=after_tools)
        return self._without_close(last_token, self.processor.measure_text(*rendered))

    def encode(self, last_token: int, observation: Observation, *, after_tools: bool = False) -> EncodedPrompt:
        """`measure` with the pixels of the observation's images."""
        rendered = self._rendered(observation, after_tools=after_tools)
        return self._without_close(last_token, self.processor.encode_text(*rendered))

    def said(self, text: str) -> np.ndarray:
        """Tokens of a turn that nobody sampled: the text, and what closes a turn. Reserved text is written apart."""
        return np.asarray([*self.processor.tokenize(self._written_apart(text)), self._close_id], np.int32)

    def opened(self, prompt: Prompt, opening: Observation) -> Prompt:
        """The prompt with what an environment opens with, at the end of its last message if that is a user's: templates
        take no two in a row. Text that would follow on text begins a line."""
        *before, last = prompt.messages
        if last.role != "user":
            before, last = [*before, last], ChatMessage(role="user", content=())
        content: list[ContentPart] = list(last.content)
        for message in opening.messages:
            for number, part in enumerate(message.parts):
                shown = TextPart(text=self._written_apart(part)) if isinstance(part, str) else ImagePart()
                newest = content[-1] if content and number == 0 else None
                if isinstance(newest, TextPart) and isinstance(shown, TextPart):
                    content[-1] = TextPart(text=_on_lines(newest.text, shown.text))
                else:
                    content.append(shown)
        messages = (*before, ChatMessage(role="user", content=tuple(content)))
        hashes = (*prompt.image_hashes, *map(content_hash, opening.images))
        return Prompt.model_validate(
            {**dict(prompt), "messages": messages, "image_hashes": hashes}  # counts placeholders and images
        )

    def _without_close(self, last_token: int, whole: EncodedPrompt) -> EncodedPrompt:
        if last_token != self._close_id:
            return whole
        assert whole.unexpanded_ids is not None, "text is measured with its placeholders"
        return replace(
            whole,
            token_ids=whole.token_ids[1:],
            token_types=whole.token_types[1:],
            unexpanded_ids=whole.unexpanded_ids[1:],
        )

    def _rendered(self, observation: Observation, *, after_tools: bool) -> tuple[str, tuple[bytes, ...], str]:
        """Text, images, and the name of both in messages to the user."""
        if observation.images and self._images_in is None:
            raise UserError(
                "an image came after a turn of the model, and its chat template shows images of neither tools nor "
                "users there. Use a model that sees images, or tools that answer in text"
            )
        arranged = self._arranged(observation.messages)
        text = (
            self._text_behind(arranged, "tool") if after_tools and self._counts_tools else self._text_behind(arranged)
        )
        return text, observation.images, "an observation"

    def _arranged(self, messages: Sequence[Message]) -> list[_Rendered]:
        """Messages in roles that the template shows. Images that it does not show in a tool's result follow in a user's
        message; messages of a user that come together are one, since some templates take no two."""
        arranged: list[_Rendered] = []
        for message in messages:
            role = self._tools_as if message.role == "tool" else "user"
            parts: list[dict[str, str]] = []
            images: list[dict[str, str]] = []
            for is_image, pieces in groupby(message.parts, lambda part: isinstance(part, bytes)):
                if is_image:
                    kept = parts if role == self._images_in else images
                    kept += [{"type": "image"} for _ in pieces]
                else:
                    text = "".join(self._written_apart(piece) for piece in pieces if isinstance(piece, str))
                    _add_parts(parts, [{"type": "text", "text": text}])
            _add(arranged, role, parts)
            _add(arranged, "user", images)
        return arranged

    def _written_apart(self, text: str) -> str:
        """The text with a space behind the first character of whatever the template reserves."""
        return self._reserved.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    # --- the template ---------------------------------------------------------------------------

    def _text_behind(self, messages: list[_Rendered], *before: str, add_generation_prompt: bool = True) -> str:
        """Text that the template writes behind the last answer, which `messages` follow. Each role of `before` has said
        something before another answer."""
        turns = 1 + len(before)
        talk = [said(*pair) for role in ("user", *before) for pair in ((role, ASKED), ("assistant", SAID))]
        try:
            text = self.processor.render_messages([*talk, *messages], add_generation_prompt=add_generation_prompt)
        except Exception as error:  # templates raise what they like
            raise self._refused(
                f"it fails on a conversation of several turns ({type(error).__name__}: {error})"
            ) from error
        pieces = text.split(SAID, turns)
        if len(pieces) <= turns:
            raise self._refused("it does not show what the assistant has said, word for word")
        return pieces[-1]

    def _shows(self, role: Literal["tool", "user"], *, image: bool = False) -> bool:
        """Return whether the template takes such a message after a turn, and shows its text and its image."""
        placeholder = self.processor.image_token_id
        if image and not self.processor.sees_images:
            return False
        parts = [{"type": "text", "text": SHOWN}, *([{"type": "image"}] if image else [])]
        try:
            text = self._text_behind([{"role": role, "content": parts}])
        except UserError:
            return False
        return SHOWN in text and (
            not image or sum(token == placeholder for token in self.processor.tokenize(text)) == 1
        )

    def _check_close(self, stop_token_ids: Sequence[int]) -> int:
        """The token that closes a turn: one by which sampling stops, so that the model learns to close its turns."""
        first = next(iter(self.processor.tokenize(self._close)), None)
        if first is None or first not in stop_token_ids:
            named = self.processor.tokenizer.convert_ids_to_tokens(list(stop_token_ids))
            raise self._refused(
                f"it closes a turn of the assistant with {self._close!r}, which does not begin with a stop token "
                f"({', '.join(map(repr, named))}): what the model samples last would not be what stands there"
            )
        return first

    def _check_history(self) -> None:
        """Refuse a template that writes the same messages differently by what came before, or before what follows."""
        shown = [said("user", SHOWN)]
        text, unopened = self._text_behind(shown), self._text_behind(shown, add_generation_prompt=False)
        if not text.startswith(self._close):
            raise self._refused(
                f"it closes a turn of the assistant with {self._close!r} at the end of a conversation, and writes "
                f"{text[: len(self._close)]!r} where the conversation goes on"
            )
        if not text.startswith(unopened) or text == unopened:
            raise self._refused("it does not open a turn of the assistant after what a user says")
        if self._text_behind(shown, "user") != text:
            raise self._refused("it writes the same message differently in a longer conversation")

    def _check_tools(self) -> bool:
        """Whether the template writes messages differently once it has written a tool's result, as DeepSeek's marks the
        first of all. Refuse one with more than these two forms."""
        counts = False
        for role in ("tool", "user"):
            shown = [said(role, SHOWN)]
            first, second, third = (self._text_behind(shown, *["tool"] * earlier) for earlier in range(3))
            if not all(text.startswith(self._close) for text in (first, second)):
                raise self._refused(
                    f"it does not close a turn of the assistant with {self._close!r} before a tool's result"
                )
            if third != second:
                raise self._refused("it writes the same message differently after one result of a tool and after two")
            counts |= second != first
        return counts

    def _refused(self, reason: str) -> UserError:
        return UserError(
            f"the chat template of this model cannot carry a conversation of several turns: {reason}. Use a model "
            "whose template can, or fix chat_template.jinja in the model folder"
        )


def start_of(prompt: Prompt, images: Sequence[bytes], seed: int, index: int = 0) -> Start:
    """Start of an episode for this prompt; `images` are its encoded ones, `seed` is the ticket's."""
    return Start(
        row={"answer": None, **prompt.columns, **({} if prompt.answer is None else {"answer": prompt.answer})},
        messages=list(map(plain_message, prompt.messages)),
        images=list(images),
        seed=seed,
        index=index,
    )


def _add(messages: list[_Rendered], role: str, parts: list[dict[str, str]]) -> None:
    """Add a message, or its parts to the user's one before it; nothing where there are none."""
    if not parts:
        return
    if messages and messages[-1]["role"] == role == "user":
        _add_parts(messages[-1]["content"], parts)
    else:
        messages.append({"role": role, "content": parts})


def _add_parts(content: list[dict[str, str]], parts: list[dict[str, str]]) -> None:
    """Add parts to others. Text behind text is one part with it, since templates may trim each."""
    first, *rest = parts
    if content and content[-1]["type"] == first["type"] == "text":
        content[-1] = {"type": "text", "text": _on_lines(content[-1]["text"], first["text"])}
    else:
        content.append(first)
    content += rest


def _reserved_texts(processor: PromptProcessor) -> re.Pattern[str]:
    """Texts that would become tokens of another meaning: special ones, and those that the template writes itself."""
    tokenizer, template = processor.tokenizer, str(processor.template.source)
    texts = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if (token.special or token.content in template) and len(token.content.strip()) > 1
    ]
    # "(?!)" is found nowhere: a tokenizer without such texts reserves nothing.
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _on_lines(text: str, behind: str) -> str:
    """Both texts, each of which begins a line where they would run together."""
    runs_on = text and behind and not text[-1].isspace() and not behind[0].isspace()
    return f"{text}\n{behind}" if runs_on else text + behind
