"""Chat templates of released families: turns, tools, settings, and words that they begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.sections import DataConfig
from asyncrl.environments.interface import PromptTools
from asyncrl.environments.observation import Message, Observation
from asyncrl.errors import UserError
from asyncrl.processing.bridge import TurnBridge
from asyncrl.processing.chat_template import settings_of
from asyncrl.processing.processor import PromptProcessor
from protocol.handshake import check_hello
from protocol.messages import ChatMessage, Prompt, TextPart
from tests.rigs import chat_templates as templates
from tests.rigs.chat_templates import make_text_model
from tests.rigs.fuzz import content
from tests.rigs.tool_schemas import CROP

DAY = "2024-02-29"
FAMILIES = {
    "Qwen3": (templates.released("qwen3"), "<|im_end|>"),
    "Qwen3.6": (templates.released("qwen3_6"), "<|im_end|>"),
    "SmolLM2": (templates.released("smollm2"), "<|im_end|>"),
    "gpt-oss": (templates.released("gpt_oss"), "<|return|>"),
    "Gemma 3": (templates.GEMMA_3, "<end_of_turn>"),
    "Llama 3.2": (templates.LLAMA_3_2, "<|eot_id|>"),
    "DeepSeek V3": (templates.DEEPSEEK_V3, "</s>"),
}
SMOL = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CHATML = "<|im_start|>user\n7<|im_end|>\n<|im_start|>assistant\n"
ONE_TURN = {
    "Qwen3": CHATML,
    "Qwen3.6": f"{CHATML}<think>\n",
    "SmolLM2": f"<|im_start|>system\n{SMOL}<|im_end|>\n{CHATML}",
    "gpt-oss": "<|end|><|start|>user<|message|>7<|end|><|start|>assistant",
    "Gemma 3": "<bos><start_of_turn>user\n7<end_of_turn>\n<start_of_turn>model\n",
    "Llama 3.2": "Today Date: 29 Feb 2024\n\n<|eot_id|><|head|>user<|/head|>\n\n7<|eot_id|><|head|>assistant"
    "<|/head|>\n\n",
    "DeepSeek V3": "<|User|>7<|Assistant|>",
}
"""Ends of the rendered question `7`."""
SETTINGS = {
    "Qwen3": ({"enable_thinking": False}, "assistant\n<think>\n\n</think>\n\n"),
    "Qwen3.6": ({"enable_thinking": False}, "assistant\n<think>\n\n</think>\n\n"),
    "gpt-oss": ({"reasoning_effort": "low"}, "Reasoning: low\n"),
    "Llama 3.2": ({"date_string": "long ago"}, "Today Date: long ago\n"),
}
OWN_WORDS = {
    "SmolLM2": f"'{SMOL}'. A system message (data.system_prompt) takes",
    "gpt-oss": r"trained by OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: 2024-02-29\n\nReasoning: medium",
    "Llama 3.2": "'Today Date: 29 Feb 2024'",
}


def said(role: str, text: str, **others: Any) -> ChatMessage:
    return ChatMessage(role=role, content=(TextPart(text=text),) if text else (), others=others)  # pyright: ignore[reportArgumentType]


def prompt(*messages: ChatMessage) -> Prompt:
    return Prompt(row_id="r", messages=messages)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_text_model(tmp_path_factory.mktemp("model"), *FAMILIES[family]).model_copy(
        update={"template_date": DAY}
    )


@pytest.fixture(scope="module")
def processor(model: Any) -> PromptProcessor:
    return PromptProcessor(model)


def test_a_turn_begins_and_ends_as_the_family_does(family: str, processor: PromptProcessor) -> None:
    assert processor.render(prompt(said("user", "7"))).endswith(ONE_TURN[family])
    completion = processor.tokenize_completion("8")
    assert processor.tokenizer.decode(completion) == f"8{FAMILIES[family][1]}"
    assert completion[-1] in processor.ends.stop_token_ids


def test_thoughts_of_earlier_turns_are_left_out_by_templates_alone(family: str, processor: PromptProcessor) -> None:
    """A row's earlier turn loses its thinking where the template takes it away, and has all of it elsewhere."""
    asked = prompt(said("user", "7"), said("assistant", "<think>\nwhy\n</think>\n\n8"), said("user", "9"))
    text = processor.render(asked)
    assert ("why" in text) == (not family.startswith("Qwen3"))
    assert "8" in text


def test_several_turns_go_on_as_the_template_or_are_refused_with_the_reason(
    family: str, processor: PromptProcessor
) -> None:
    stops = processor.ends.stop_token_ids
    if family == "gpt-oss":
        with pytest.raises(
            UserError, match=r"closes a turn .* with '<\|return\|>' at the end .* and writes '<\|end\|>"
        ):
            TurnBridge(processor, stops)
        return
    first = prompt(said("user", "7"))
    bridge = TurnBridge(processor, stops).measure(stops[0], Observation((Message("user", ("9",)),)))
    whole = processor.render(prompt(*first.messages, said("assistant", "8"), said("user", "9")))
    opening = "<think>\n" if family == "Qwen3.6" else ""
    ids = [*processor.tokenize(processor.render(first).removesuffix(opening)), *processor.tokenize_completion("8")]
    assert processor.tokenizer.decode([*ids, *bridge.token_ids]) == whole


def test_settings_reach_the_prompt_and_servers_with_others_are_refused_by_name(
    family: str, model: Any, processor: PromptProcessor
) -> None:
    with pytest.raises(UserError, match=r"sets think, which the model's chat template does not read.* It reads "):
        PromptProcessor(model, {"think": True})
    if family not in SETTINGS:
        return
    settings, written = SETTINGS[family]
    mine = PromptProcessor(model, settings)
    asked = prompt(said("user", "7"))
    assert written in mine.render(asked)
    assert written not in processor.render(asked)
    hello = content.hello("s").model_copy(update={"processor_fingerprint": mine.fingerprint})
    refusal = check_hello(
        hello, model_fingerprint=content.MODEL, processor_fingerprint=processor.fingerprint, live_server_ids={}
    )
    assert refusal is not None
    assert f' data.chat_template_kwargs={{"{next(iter(settings))}": ' in refusal.reason
    assert "data.chat_template_kwargs" in refusal.fix


def test_words_that_a_template_begins_with_are_told(family: str, processor: PromptProcessor) -> None:
    text = processor.render(prompt(said("user", "7")))
    told = processor.template.described_system_prompt(text)
    assert OWN_WORDS.get(family, "") in told
    assert bool(told) == (family in OWN_WORDS)
    with_system = processor.render(prompt(said("system", "Think."), said("user", "7")))
    assert bool(processor.template.described_system_prompt(with_system)) == (family in {"gpt-oss", "Llama 3.2"})


def test_tools_are_listed_in_the_templates_own_form_where_it_is_read(family: str, model: Any) -> None:
    hermes, xml = ("<tool_call>", '"name"', '"arguments"'), ("<tool_call>", "<function=", "<parameter=")
    processor = PromptProcessor(model)
    processor.show_tools(PromptTools((CROP,), "You can call crop.", (hermes, xml)))
    text = processor.render(prompt(said("user", "7")))
    assert ("You can call crop." in text) == (not family.startswith("Qwen3"))
    assert ("<function=" in text) == (family == "Qwen3.6")
    assert ('{"name": <function-name>' in text) == (family == "Qwen3")


CALLS = {
    "Qwen3": '<tool_call>\n{"name": "crop", "arguments": {"row": 1}}\n</tool_call><|im_end|>',
    "Qwen3.6": "<tool_call>\n<function=crop>\n<parameter=row>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>",
    "gpt-oss": 'assistant to=functions.crop<|channel|>commentary json<|message|>{"row": 1}<|call|>',
    "Llama 3.2": '{"name": "crop", "parameters": {"row": 1}}<|eot_id|>',
}


def test_calls_of_a_row_are_written_in_the_templates_own_form_or_the_row_is_bad(
    family: str, processor: PromptProcessor
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "crop", "arguments": {"row": 1}}}
    asked = prompt(said("user", "7"), said("assistant", "", tool_calls=[call]), said("tool", "seen"))
    if family in CALLS:
        text = processor.render(asked)
        assert CALLS[family] in text
        assert "seen" in text.partition(CALLS[family])[2]
    else:
        with pytest.raises(UserError, match="has tool_calls, and the model's chat template does not show them"):
            processor.render(asked)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "strftime_now", "eos_token"])
def test_names_that_a_run_sets_are_refused(tmp_path: Path, name: str) -> None:
    model = make_text_model(tmp_path, *FAMILIES["gpt-oss"])
    with pytest.raises(UserError, match=f"data.chat_template_kwargs sets {name}, which is not the configuration's"):
        PromptProcessor(model, {name: "x"})


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("{% if x %}{% set y = 1 %}{% else %}{% set y = 2 %}{% endif %}{{ y }}", {"x"}),
        ("{% if day is not defined %}{% set day = 'today' %}{% endif %}{{ day }}", {"day"}),
        ("{% set think = think | default(true) %}{{ think }}", {"think"}),
        ("{% for call in calls %}{{ call }}{% endfor %}{{ call }}", {"calls"}),
    ],
)
def test_names_that_a_template_sets_first_are_no_settings(source: str, read: set[str]) -> None:
    assert settings_of(source) == read


def test_values_are_json() -> None:
    """What config.yaml holds is what `--resume` reads again."""
    given = {"enable_thinking": False, "reasoning_effort": "low", "builtin_tools": ["python"]}
    assert DataConfig(train_files=("a",), chat_template_kwargs=given).chat_template_kwargs == given  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="JSON"):
        DataConfig.model_validate({"train_files": ["a"], "chat_template_kwargs": {"x": {1, 2}}})
