"""A completion ends by the tokens that the model's files name, and by the one that closes a turn in its template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.checks.prompt_rows import preview_rows
from asyncrl.config.schema import RunConfig
from asyncrl.errors import UserError
from asyncrl.processing.bridge import TurnBridge
from tests.rigs import chat_templates as templates
from tests.rigs.chat_templates import make_text_model, text_processor

CASES: dict[str, tuple[str, str | None, dict[str, Any], set[str], str]] = {
    # template, the tokenizer's eos, files, what stops, how a demonstration ends
    "all agree": (templates.CHATML, "<|im_end|>", {}, {"<|im_end|>"}, "<|im_end|>"),
    "a base model with a template": (
        templates.CHATML,
        "<|endoftext|>",
        {"generation": {"eos_token_id": "<|endoftext|>"}},
        {"<|endoftext|>", "<|im_end|>"},
        "<|im_end|>",
    ),
    "a list of generation_config.json": (
        templates.GEMMA,
        "<eos>",
        {"generation": {"eos_token_id": ["<eos>", "<end_of_turn>"]}},
        {"<eos>", "<end_of_turn>"},
        "<end_of_turn>",
    ),
    "config.json alone": (
        templates.MISTRAL,
        None,
        {"described": {"eos_token_id": "</s>"}},
        {"</s>"},
        "</s>",
    ),
    "a list of config.json": (
        templates.GLM,
        "<|endoftext|>",
        {"described": {"eos_token_id": ["<|endoftext|>", "<|user|>", "<|observation|>"]}},
        {"<|endoftext|>", "<|user|>", "<|observation|>"},
        "<|user|>",
    ),
    "the text part of config.json": (
        templates.PLAIN,
        None,
        {"described": {"eos_token_id": None, "text_config": {"eos_token_id": "<eos>"}}, "generation": {}},
        {"<eos>"},
        "<eos>",
    ),
    "an end of two tokens": (
        templates.COMMAND,
        "<|END_TURN|>",
        {},
        {"<|END_TURN|>"},
        "<|END_TEXT|><|END_TURN|>",
    ),
    "a space before the end": (templates.LLAMA2, "</s>", {}, {"</s>"}, " </s>"),
    "another end where the conversation stops": (
        templates.GPT_OSS,
        "<|return|>",
        {},
        {"<|return|>"},
        "<|return|>",
    ),
    "no end in the template": (templates.PLAIN, "<eos>", {}, {"<eos>"}, "<eos>"),
    "a template that opens a turn each time": (templates.OPEN, "<eos>", {}, {"<eos>"}, "<eos>"),
    "a template of one turn": (
        "{% if messages | length > 2 %}{{ raise_exception('one') }}{% endif %}" + templates.CHATML,
        "<|endoftext|>",
        {},
        {"<|endoftext|>", "<|im_end|>"},
        "<|im_end|>",
    ),
    "a template that shows no answer": ("{{ messages[0].content }}", "<eos>", {}, {"<eos>"}, "<eos>"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_completion_ends_as_the_files_and_the_template_say(tmp_path: Path, case: str) -> None:
    template, eos, files, stops, end = CASES[case]
    processor = text_processor(tmp_path / "model", template, eos, **files)
    assert {*processor.tokenizer.convert_ids_to_tokens(list(processor.ends.stop_token_ids))} == stops
    completion = processor.tokenize_completion("7")
    assert processor.tokenizer.decode(completion) == f"7{end}"
    assert completion[-1] in processor.ends.stop_token_ids, "as a sampled completion that is over"


@pytest.mark.parametrize("end", ["<|fin|>", "\nEND\n", "###"])
def test_an_end_of_turn_that_is_no_token_is_refused_with_the_fix(tmp_path: Path, end: str) -> None:
    template = templates.CHATML.replace("<|im_end|>\\n", end)
    with pytest.raises(UserError, match=r"closes a turn of the assistant with .* no special token .*add_spec"):
        text_processor(tmp_path / "model", template, "<|endoftext|>").ends  # noqa: B018


def test_nothing_that_ends_a_completion_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="completions could never finish"):
        text_processor(tmp_path / "model", templates.PLAIN, None).ends  # noqa: B018
    with pytest.raises(UserError, match=r"eos_token_id in \S+generation_config.json is {'x': 1}"):
        text_processor(tmp_path / "b", templates.PLAIN, None, generation={"eos_token_id": {"x": 1}}).ends  # noqa: B018


def test_ids_of_ordinary_text_in_config_json_stop_nothing(tmp_path: Path) -> None:
    """transformers writes the defaults of its classes there, such as 2, which is a character for another tokenizer."""
    processor = text_processor(tmp_path / "model", templates.CHATML, "<|im_end|>", described={"eos_token_id": 2})
    assert processor.tokenizer.convert_ids_to_tokens([2]) == ["#"]
    assert processor.tokenizer.convert_ids_to_tokens(list(processor.ends.stop_token_ids)) == ["<|im_end|>"]


def test_conversations_and_single_turns_end_alike(tmp_path: Path) -> None:
    processor = text_processor(tmp_path / "model", templates.CHATML, "<|endoftext|>")
    bridge = TurnBridge(processor, processor.ends.stop_token_ids)
    assert processor.tokenizer.decode(bridge.said("7")) == "7<|im_end|>"


def test_dry_run_says_what_ends_a_completion(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "7", "answer": "7"}\n')
    data = {"train_files": [str(tmp_path / "rows.jsonl")], "val_files": []}
    model = make_text_model(tmp_path / "model", templates.CHATML, "<|endoftext|>")
    seen, _ = preview_rows(make_config(data=data, model={"path": model.path}))
    assert "a completion ends with '<|im_end|>', '<|endoftext|>'; '<|im_end|>' closes a turn in the chat tem" in seen
