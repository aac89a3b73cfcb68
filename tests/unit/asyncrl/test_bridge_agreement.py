"""Turns and bridges are, token by token, the conversation that the chat template writes at once, for every template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from asyncrl.environments.observation import Message, Observation, PastTurn
from asyncrl.errors import UserError
from asyncrl.processing.bridge import TurnBridge
from asyncrl.processing.history import History
from asyncrl.processing.processor import PromptProcessor
from protocol.messages import ChatMessage, Prompt, TextPart
from tests.rigs import chat_templates as templates
from tests.rigs.chat_templates import text_processor
from tests.unit.asyncrl.test_history import rule

BRIDGED = {
    "ChatML": (templates.CHATML, "<|im_end|>"),
    "Qwen": (templates.QWEN, "<|im_end|>"),
    "Gemma": (templates.GEMMA, "<eos>"),
    "Llama": (templates.LLAMA, "<|eot_id|>"),
    "DeepSeek": (templates.DEEPSEEK, "</s>"),
    "DeepSeek, each result marked": (templates.DEEPSEEK.replace("is_first = false", "is_tool = true"), "</s>"),
}
UNBRIDGED = {
    "a space before the end": (templates.LLAMA2, "</s>"),
    "two tokens that end a turn": (templates.COMMAND, "<|END_TURN|>"),
    "no end of turn": (templates.GLM, "<|user|>"),
    "nothing opens a turn": (templates.MISTRAL, "</s>"),
    "another end where a conversation stops": (templates.GPT_OSS, "<|return|>"),
    "numbered results of tools": (
        templates.CHATML.replace("m.role +", "m.role + (loop.index | string if m.role == 'tool' else '') +"),
        "<|im_end|>",
    ),
    "another end before a tool's result": (
        templates.CHATML.replace(
            "'<|im_end|>\\n'",
            "('<|end|>' if not loop.last and messages[loop.index0 + 1].role == 'tool' else '<|im_end|>') + '\\n'",
        ),
        "<|im_end|>",
    ),
}
TOOL_1, TOOL_2, TOOL_3, USER = (
    Message(role, (text,)) for role, text in zip(("tool",) * 3 + ("user",), "1234", strict=True)
)
CONVERSATIONS: dict[str, list[tuple[Message, ...]]] = {
    "one result after another": [(TOOL_1,), (TOOL_2,), (TOOL_3,)],
    "two results at once": [(TOOL_1, TOOL_2), (TOOL_3,)],
    "a user after a result": [(TOOL_1,), (USER,), (TOOL_2,)],
    "a result after a user": [(USER,), (TOOL_1, TOOL_2), (USER,)],
    "both at once": [(TOOL_1, USER), (TOOL_2,)],
}


@pytest.fixture(scope="module", params=BRIDGED)
def processor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PromptProcessor:
    template, eos = BRIDGED[request.param]
    return text_processor(tmp_path_factory.mktemp("model"), template, eos)


def message(role: str, text: str) -> ChatMessage:
    return ChatMessage.model_validate({"role": role, "content": [TextPart(text=text)]})


def whole(processor: PromptProcessor, prompt: Prompt, shown: Sequence[Sequence[Message]]) -> list[int]:
    """The conversation at once, with the answer 7 in each turn. Where the template takes no tools, a user says their
    results, a line each."""
    takes_tools = "alternate" not in str(processor.template.source)
    messages = list(prompt.messages)
    for observation in shown:
        messages.append(message("assistant", "7"))
        said = [(each.role, str(each.parts[0])) for each in observation]
        messages += (
            [message(*each) for each in said] if takes_tools else [message("user", "\n".join(text for _, text in said))]
        )
    return processor.tokenize(processor.render(prompt.model_copy(update={"messages": tuple(messages)})))


def row(processor: PromptProcessor, prompt: Prompt, history: History) -> list[int]:
    pieces = (piece.token_ids.tolist() for piece in history.pieces)
    return [*processor.tokenize(processor.render(prompt)), *(token for piece in pieces for token in piece)]


def follow(processor: PromptProcessor, prompt: Prompt, shown: Sequence[Sequence[Message]]) -> History:
    bridge = TurnBridge(processor, processor.ends.stop_token_ids)
    history = History(bridge, rule(), prompt, pixels=False)
    for observation in map(Observation, map(tuple, shown)):
        history.add_turn(np.asarray(processor.tokenize_completion("7"), np.int32))
        history.show(observation, history.after(observation))
    return history


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_turns_and_bridges_are_the_templates_own_conversation(processor: PromptProcessor, name: str) -> None:
    shown, prompt = CONVERSATIONS[name], Prompt(row_id="r", messages=(message("user", "5"),))
    ids = row(processor, prompt, follow(processor, prompt, shown))
    assert processor.tokenizer.decode(ids) == processor.tokenizer.decode(whole(processor, prompt, shown))
    assert ids == whole(processor, prompt, shown)


def test_results_in_the_prompt_and_in_left_out_turns_are_counted_as_the_template_does(
    processor: PromptProcessor,
) -> None:
    asked = [message("user", "5"), message("assistant", "6")]
    if "alternate" not in str(processor.template.source):
        asked += [message("tool", "8"), message("assistant", "6")]
    prompt = Prompt(row_id="r", messages=(*asked, message("user", "9")))
    shown = [(TOOL_1,), (TOOL_2,)]
    history = follow(processor, prompt, shown)
    assert row(processor, prompt, history) == whole(processor, prompt, shown)

    prompt = Prompt(row_id="r", messages=(message("user", "5"),))
    history = follow(processor, prompt, shown)
    history.add_turn(np.asarray(processor.tokenize_completion("7"), np.int32))
    third = Observation((TOOL_3,))
    history.show(third, history.after(third, (PastTurn(1), PastTurn(2))))
    assert row(processor, prompt, history) == whole(processor, prompt, [(TOOL_2,), (TOOL_3,)])


@pytest.mark.parametrize("name", UNBRIDGED)
def test_templates_that_no_bridge_agrees_with_are_refused(tmp_path: Path, name: str) -> None:
    processor = text_processor(tmp_path, *UNBRIDGED[name])
    with pytest.raises(UserError, match="cannot carry a conversation of several turns"):
        TurnBridge(processor, processor.ends.stop_token_ids)
