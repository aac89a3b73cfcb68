"""Tools in the prompt by call format, and always the same on both sides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.config.environment import EnvironmentConfig
from asyncrl.config.sections import ModelConfig
from asyncrl.environments.episodes import prompt_tools
from asyncrl.environments.interface import PromptTools
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.tools import prompt
from asyncrl_plugins.tools.call_formats import CallReader, parse_calls
from asyncrl_plugins.tools.schema import Tool
from protocol.messages import ChatMessage, Prompt, TextPart
from tests.rigs.chat_templates import released, text_processor
from tests.rigs.tiny_families import make_family
from tests.rigs.tool_schemas import CROP, LISTS_TOOLS

PROMPT = Prompt(row_id="r", messages=(ChatMessage(role="user", content=(TextPart(text="Which digit?"),)),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("qwen2_vl", tmp_path_factory.mktemp("tool_prompt"))


def shown(call_format: str) -> PromptTools:
    function = CROP["function"]
    crop = Tool(function["name"], function["description"], function["parameters"])
    made = prompt.prompt_tools([crop], CallReader(call_format, {"crop": crop.parameters}), "auto")
    assert made is not None
    assert made.schemas == (CROP,)
    return made


def test_a_prompt_ends_with_the_form_of_a_call_unless_the_template_asks_for_it(folder: Path) -> None:
    plain = "crop ROW SIZE: Show a part larger. (row: row of the grid; size: how large, one of"
    cases = {"hermes": json.dumps(CROP["function"]), "plain": plain, "qwen_xml": "<function=NAME>"}
    template = PromptProcessor(ModelConfig(path=str(folder))).processor.chat_template
    for before, is_listed in (("", False), (LISTS_TOOLS, True)):
        processor = PromptProcessor(ModelConfig(path=str(folder)))
        processor.processor.chat_template = before + template
        for call_format, told in cases.items():
            processor.show_tools(shown(call_format))
            text = processor.render(PROMPT)
            assert ("You can call these tools:" in text) == (not is_listed or call_format != "hermes")
            assert told in text or (is_listed and call_format == "hermes")
            assert text.count("system") == 1, "one system message"


def test_what_the_text_asks_for_is_what_the_parser_reads() -> None:
    schemas = {"crop": CROP["function"]["parameters"]}
    for call_format, values in {
        "hermes": {"NAME": '"crop"', "{PARAMETER: VALUE}": '{"row": 1}'},
        "qwen_xml": {"NAME": "crop", "PARAMETER": "row", "VALUE": "1"},
    }.items():
        form = shown(call_format).text.partition("<tool_call>")
        asked = form[1] + form[2]
        for word, value in values.items():
            asked = asked.replace(word, value)
        (call,) = parse_calls(call_format, asked, schemas)
        assert (call.name, call.arguments, call.error) == ("crop", {"row": 1}, "")


def test_the_learner_asks_the_environment_itself() -> None:
    asked = prompt_tools(EnvironmentConfig.model_validate({"name": "tools", "config": {"functions": ["calculator"]}}))
    assert asked is not None
    assert [schema["function"]["name"] for schema in asked.schemas] == ["calculator"]
    assert asked.example == '<tool_call>{"name": "calculator", "arguments": {"expression": "text"}}</tool_call>'
    assert PromptTools.from_json(asked.as_json) == asked, "as a replay reads it of the journal"

    assert prompt_tools(EnvironmentConfig.model_validate({})) is None
    off = {"functions": ["calculator"], "show_tools": "off"}
    example = "examples/calc/environment.py:Calc"  # its policy was taught the calls
    for name, config, show in (("tools", off, "off"), (example, {}, "off"), (example, {"show_tools": "text"}, "text")):
        asked = prompt_tools(EnvironmentConfig.model_validate({"name": name, "config": config}))
        assert asked is not None
        assert asked.show == show


@pytest.mark.parametrize(("name", "asked"), [("qwen3", '{"name": <function-name>'), ("qwen3_6", "<function=example_")])
def test_by_default_calls_have_the_templates_own_form(tmp_path: Path, name: str, asked: str) -> None:
    """Qwen3 asks for JSON, Qwen3.5 and 3.6 for XML; the example that each template writes is read."""
    processor = text_processor(tmp_path, released(name), "<|im_end|>")
    processor.show_tools(shown("tool_call"))
    text = processor.render(PROMPT)
    assert asked in text
    assert "You can call these tools:" not in text
    for written in (
        '{"name": "crop", "arguments": {"row": 1}}',
        "<function=crop>\n<parameter=row>\n1\n</parameter>\n</function>",
    ):
        (call,) = parse_calls(
            "tool_call", f"<tool_call>\n{written}\n</tool_call>", {"crop": CROP["function"]["parameters"]}
        )
        assert (call.name, call.arguments, call.error) == ("crop", {"row": 1}, "")
    broken = parse_calls(
        "tool_call", "<tool_call>\n<function=crop>1\n</function></tool_call><tool_call>{}</tool_call>", {}
    )
    assert [call.error.partition(": ")[2][:24] for call in broken] == [
        "expected <parameter=NAME",
        'expected {"name": ..., "',
    ]
