"""Text of a row that the model would not read as text: its image placeholders, and tokens that part the turns."""

from __future__ import annotations

import json
from typing import Any

from asyncrl.environments.observation import THINKING_BEGINS, THINKING_ENDS
from asyncrl.errors import UserError
from asyncrl.processing.chat_template import ChatTemplate, said
from protocol.messages import Prompt


class ReservedText:
    def __init__(self, placeholders: tuple[str, ...], template: ChatTemplate, tokenizer: Any):
        self.placeholders = placeholders
        self._turns = _turn_tokens(template, tokenizer).difference(placeholders)

    def check(self, prompt: Prompt) -> None:
        """Raise UserError for a row whose text has any. Processors fail on placeholders, or worse, do not."""
        for message in prompt.messages:
            others = json.dumps(message.others, ensure_ascii=False, default=str)
            text = "\0".join([others, *(part.text for part in message.content if part.type == "text")])
            where = f"row {prompt.row_id}: the text of the {message.role} message contains"
            if found := next((each for each in self.placeholders if each in text), None):
                raise UserError(
                    f"{where} {found!r}, which the model reserves for images. Write <image> (or <video>) where one "
                    "belongs, or take it out of the text"
                )
            if found := next((each for each in self._turns if each in text), None):
                raise UserError(
                    f"{where} {found!r}, with which the chat template ends or begins a turn, or a text. Write it "
                    f"apart ({f'{found[0]} {found[1:]}'!r}), or leave the row out"
                )


def _turn_tokens(template: ChatTemplate, tokenizer: Any) -> set[str]:
    """Added tokens of a conversation around what is said, and those that begin and end a text.

    A tag of thinking is none: prompts ask for it by name.
    """
    found = {tokenizer.bos_token, tokenizer.eos_token}
    talk = [said(role, "-") for role in ("system", "user", "assistant", "user")]
    for messages in (talk, talk[1:]):
        try:
            text = template.render(messages, add_generation_prompt=True)
        except Exception:  # templates raise what they like: some take no system message
            continue
        added = tokenizer.added_tokens_decoder
        found |= {
            added[token].content for token in tokenizer(text, add_special_tokens=False)["input_ids"] if token in added
        }
    return {text for text in found if text and len(text.strip()) > 1} - {THINKING_BEGINS, THINKING_ENDS}
