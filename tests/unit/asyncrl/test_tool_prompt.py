"""Tools in the prompt: by the chat template's own list, or as text."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config.sections import ModelConfig
from asyncrl.environments.interface import PromptTools
from asyncrl.errors import UserError
from asyncrl.processing.bridge import TurnBridge
from asyncrl.processing.processor import PromptProcessor
from protocol.messages import ChatMessage, Prompt, TextPart
from tests.rigs.tiny_families import make_family
from tests.rigs.tool_schemas import CROP, LISTS_TOOLS

SHOWN = PromptTools((CROP,), "You can call crop.", (("<tool_call>", '"arguments"'),))
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

    processor.show_tools(SHOWN)

    assert processor.render(PROMPT) == processor.processor.apply_chat_template(
        [message.model_dump() for message in PROMPT.messages], tools=[CROP], add_generation_prompt=True
    )
    assert processor.fingerprint != fingerprint, "a server with other tools is refused"
    TurnBridge(processor, stops)  # the list stands before the turns
    processor.show_tools(replace(SHOWN, show="off"))
    assert (processor.render(PROMPT), processor.fingerprint) == (without, fingerprint)


def test_elsewhere_the_system_message_ends_with_the_text(folder: Path, tmp_path: Path) -> None:
    """So also where the template lists tools, but asks for calls that the environment does not read."""
    other = replace(SHOWN, markers=(("<function=",),))
    cases = [("", SHOWN), (LISTS_TOOLS, replace(SHOWN, markers=())), (LISTS_TOOLS, other)]
    for number, (before, shown) in enumerate([*cases, (LISTS_TOOLS, replace(SHOWN, show="text"))]):
        processor = processor_of(folder, tmp_path / f"m{number}", before)
        processor.show_tools(shown)
        assert "<|im_start|>system\n" in processor.render(PROMPT)
        system = ChatMessage(role="system", content=(TextPart(text="Be brief."),))
        text = processor.render(PROMPT.model_copy(update={"messages": (system, *PROMPT.messages)}))
        assert "Be brief.\n\nYou can call crop.<|im_end|>" in text
        assert PromptTools.from_json(shown.as_json) == shown, "as a replay reads it of the journal"


def test_a_template_that_cannot_is_refused_where_it_is_insisted_on(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="show_tools is template, but the model's chat template does not list tools"):
        processor_of(folder, tmp_path / "m").show_tools(replace(SHOWN, show="template"))
    lists = processor_of(folder, tmp_path / "l", LISTS_TOOLS)
    with pytest.raises(UserError, match=r"does not ask for calls as the environment reads them \(<function=\)"):
        lists.show_tools(replace(SHOWN, markers=(("<function=",),), show="template"))
    silent = processor_of(folder, tmp_path / "s", "{% set messages = messages | rejectattr('role', 'eq', 'system') %}")
    with pytest.raises(UserError, match="shows no system message"):
        silent.show_tools(SHOWN)
