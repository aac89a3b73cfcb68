"""Tools in the prompt: by the chat template's own list, or as text, and always the same on both sides."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from asyncrl.config.environment import read_environment
from asyncrl.config.sections import ModelConfig
from asyncrl.environments.call_formats import parse_calls
from asyncrl.environments.shown_tools import ShownTools, shown_tools
from asyncrl.errors import UserError
from asyncrl.processing.bridge import TurnBridge
from asyncrl.processing.processor import PromptProcessor
from protocol.messages import ChatMessage, Prompt, TextPart
from tests.rigs.tiny_families import make_family

LISTS_TOOLS = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}{{ t | tojson }}{% endfor %} Call as "
    '<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
)
"""What templates of Qwen2.5 and others begin with."""
CROP = {
    "type": "function",
    "function": {
        "name": "crop",
        "description": "Show a part larger.",
        "parameters": {
            "type": "object",
            "properties": {
                "row": {"type": "integer", "description": "row of the grid"},
                "size": {"type": "string", "enum": ["s", "l"], "default": "s", "description": "how large"},
            },
            "required": ["row"],
        },
    },
}
PROMPT = Prompt(row_id="r", messages=(ChatMessage(role="user", content=(TextPart(text="Which digit?"),)),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("qwen2_vl", tmp_path_factory.mktemp("tool_prompt"))


def processor_of(folder: Path, copy: Path, before: str = "") -> PromptProcessor:
    shutil.copytree(folder, copy)
    template = PromptProcessor(ModelConfig(path=str(folder))).processor.chat_template
    (copy / "chat_template.jinja").write_text(before + template)
    return PromptProcessor(ModelConfig(path=str(copy)))


def test_a_template_that_lists_tools_is_given_their_schemas(folder: Path, tmp_path: Path) -> None:
    processor = processor_of(folder, tmp_path / "m", LISTS_TOOLS)
    stops = (processor.tokenizer.eos_token_id,)
    without, fingerprint = processor.render(PROMPT), processor.fingerprint

    processor.show_tools(ShownTools((CROP,), "hermes"))

    assert processor.render(PROMPT) == processor.processor.apply_chat_template(
        [message.model_dump() for message in PROMPT.messages], tools=[CROP], add_generation_prompt=True
    )
    assert processor.fingerprint != fingerprint, "a server with other tools is refused"
    TurnBridge(processor, stops)  # the list stands before the turns
    processor.show_tools(None)
    assert (processor.render(PROMPT), processor.fingerprint) == (without, fingerprint)


def test_elsewhere_the_system_message_ends_with_them(folder: Path, tmp_path: Path) -> None:
    """So also where the template lists tools, but asks for calls that `call_format` does not read."""
    plain = "crop ROW SIZE: Show a part larger. (row: row of the grid; size: how large, one of"
    hermes = json.dumps(CROP["function"])
    cases = [("", "hermes", hermes), (LISTS_TOOLS, "plain", plain), (LISTS_TOOLS, "qwen_xml", "<function=NAME>")]
    for number, (before, call_format, told) in enumerate(cases):
        processor = processor_of(folder, tmp_path / f"m{number}", before)
        shown = ShownTools((CROP,), call_format)
        processor.show_tools(shown)
        system = ChatMessage(role="system", content=(TextPart(text="Be brief."),))
        text = processor.render(PROMPT.model_copy(update={"messages": (system, *PROMPT.messages)}))
        assert told in text
        assert text.index("Be brief.\n\nYou can call") < text.index("Which digit?")
        assert text.count("system") == processor.render(PROMPT).count("system"), "one system message"


def test_what_the_text_asks_for_is_what_the_parser_reads() -> None:
    schemas = {"crop": CROP["function"]["parameters"]}
    for call_format, values in {
        "hermes": {"NAME": '"crop"', "{PARAMETER: VALUE}": '{"row": 1}'},
        "qwen_xml": {"NAME": "crop", "PARAMETER": "row", "VALUE": "1"},
    }.items():
        form = ShownTools((CROP,), call_format).text().partition("<tool_call>")
        asked = form[1] + form[2]
        for word, value in values.items():
            asked = asked.replace(word, value)
        (call,) = parse_calls(call_format, asked, schemas)
        assert (call.name, call.arguments, call.error) == ("crop", {"row": 1}, "")


def test_a_template_that_cannot_is_refused_where_it_is_insisted_on(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="show_tools is template, but the model's chat template does not list tools"):
        processor_of(folder, tmp_path / "m").show_tools(ShownTools((CROP,), "hermes", "template"))
    lists = processor_of(folder, tmp_path / "l", LISTS_TOOLS)
    with pytest.raises(UserError, match="call_format=plain"):
        lists.show_tools(ShownTools((CROP,), "plain", "template"))
    silent = processor_of(folder, tmp_path / "s", "{% set messages = messages | rejectattr('role', 'eq', 'system') %}")
    with pytest.raises(UserError, match="shows no system message"):
        silent.show_tools(ShownTools((CROP,), "hermes"))


def test_the_learner_asks_the_environment_itself(tmp_path: Path) -> None:
    asked = shown_tools(read_environment({"tools": ["calculator"]}))
    assert asked is not None
    assert asked.call_format == "hermes"
    assert [schema["function"]["name"] for schema in asked.schemas] == ["calculator"]
    assert ShownTools.from_json(asked.as_json).text() == asked.text(), "as a replay reads it of the journal"

    assert shown_tools(read_environment({})) is None
    assert shown_tools(read_environment({"tools": ["calculator"], "show_tools": "off"})) is None
    example = {"name": "examples/calc/environment.py:Calc"}  # its policy was taught the calls
    assert shown_tools(read_environment(example)) is None
    assert shown_tools(read_environment({**example, "show_tools": "text"})) is not None
