"""The end of a completion: ids at which sampling stops, and what a demonstration ends with.

One rule for training, evaluation, supervised runs, demonstrations, checks and exports. Sampling stops at the ids of
`eos_token_id` in generation_config.json and config.json, at the tokenizer's, and at the token with which the chat
template closes a turn of the assistant, which base models with a template often leave out of all three.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from asyncrl.errors import UserError
from asyncrl.model_files.folder import read_json, text_part
from asyncrl.processing.chat_template import ASKED, SAID, SHOWN, ChatTemplate, said


@dataclass(frozen=True)
class CompletionEnds:
    stop_token_ids: tuple[int, ...]
    """Ids at which sampling stops, in ascending order."""
    written: tuple[int, ...]
    """Tokens that end a demonstration, as the chat template ends an assistant's turn; the last one is a stop."""
    added: int | None
    """The template's own end, where no file names it."""
    described: str
    """A line for people."""


def declared_ends(folder: Path, tokenizer: Any) -> list[int]:
    """Ids that end a text by the files of a model folder: generation_config.json's first, the tokenizer's last.

    Of config.json only special tokens count: transformers writes the defaults of its classes there, such as 2, whatever
    that is in the tokenizer. Raises UserError for what is no id.
    """
    generation, config = folder / "generation_config.json", folder / "config.json"
    described = read_json(config)
    files = {generation: read_json(generation, missing={}).get("eos_token_id"), config: described.get("eos_token_id")}
    if files[config] is None:
        files[config] = text_part(described).get("eos_token_id")
    found: list[int] = []
    for file, named in files.items():
        ids = named if isinstance(named, list) else [] if named is None else [named]
        if not all(isinstance(token, int) for token in ids):
            raise UserError(f"eos_token_id in {file} is {named!r}: expected the id of a token, or a list of ids")
        found += [token for token in ids if file is generation or token in tokenizer.added_tokens_decoder]
    return [*found, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]


def completion_ends(template: ChatTemplate, tokenizer: Any, declared: Sequence[int]) -> CompletionEnds:
    """Ends of completions by a chat template and by `declared` ids.

    Raises UserError where the template closes a turn with text that is no token, and where nothing ends a completion.
    """
    written, stops = _end_of_turn(template, tokenizer, declared), {*declared}
    added = written[-1] if written and written[-1] not in stops else None
    if not written:
        eos = tokenizer.eos_token_id
        written = [eos] if eos is not None else [*declared[:1]]
    if not written:
        raise UserError(
            "neither generation_config.json, config.json, the tokenizer nor the chat template names an "
            "end-of-sequence token: completions could never finish. Set eos_token_id in generation_config.json"
        )
    stops = tuple(sorted({*declared, written[-1]}))
    names = {token: repr(tokenizer.convert_ids_to_tokens(token)) for token in stops}
    line = f"a completion ends with {', '.join(names.values())}"
    if added is not None:
        line += (
            f"; {names[added]} closes a turn in the chat template, and neither generation_config.json, config.json nor "
            "the tokenizer names it: exports do"
        )
    return CompletionEnds(stops, tuple(written), added, line)


def _end_of_turn(template: ChatTemplate, tokenizer: Any, declared: Sequence[int]) -> list[int]:
    """Tokens from the end of what the assistant says to the one that closes its turn; none where nothing does.

    What always closes a turn is what stands there both at the end of a conversation and where a user goes on.
    """
    at_end = _behind_answer(template, tokenizer)
    if at_end is None:
        return []
    going_on = _behind_answer(template, tokenizer, SHOWN)
    always = at_end if going_on is None else _common(at_end, going_on)
    for ids, ends in ((always, declared), (always, tokenizer.added_tokens_decoder), (at_end, declared)):
        if found := [place for place, token in enumerate(ids) if token in ends]:
            return ids[: found[0] + 1]
    if text := tokenizer.decode(always).strip():
        raise UserError(
            f"the chat template closes a turn of the assistant with {text!r}, which is no special token of the "
            "tokenizer: completions could not end there. Add it (tokenizer.add_special_tokens, "
            "model.resize_token_embeddings), or write eos_token there in the chat template"
        )
    return going_on[:1] if going_on and going_on[0] in declared else []


def _behind_answer(template: ChatTemplate, tokenizer: Any, goes_on: str = "") -> list[int] | None:
    """Tokens behind the answer of a conversation, which a message of a user may follow; None where the template does
    not show the answer, or takes no such conversation."""
    messages = [said("user", ASKED), said("assistant", SAID), *([said("user", goes_on)] if goes_on else [])]
    try:
        text = template.render(messages, add_generation_prompt=False)
    except Exception:  # templates raise what they like
        return None
    _, answer, behind = text.rpartition(SAID)
    return tokenizer(behind, add_special_tokens=False)["input_ids"] if answer else None


def _common(one: Iterable[int], other: Iterable[int]) -> list[int]:
    """The tokens with which both begin."""
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
