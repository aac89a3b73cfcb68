"""The history that later turns are shown: without what was thought, and without older images."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.config.sections import ModelConfig
from asyncrl.data.images import content_hash
from asyncrl.demo.model import build_tokenizer
from asyncrl.environments.observation import LEFT_OUT, Message, Observation, Part, PastTurn, without_images
from asyncrl.errors import UserError
from asyncrl.processing.bridge import TurnBridge
from asyncrl.processing.history import History, without_thinking
from asyncrl.processing.processor import PromptProcessor
from protocol.messages import ChatMessage, ConversationLimits, ImagePart, Prompt, TextPart
from tests.rigs.pictures import picture
from tests.rigs.tiny_families import make_family

FIRST, SECOND, THIRD = picture(40, 30), picture(28, 60), picture(56, 28)
QUESTION = ChatMessage(role="user", content=(ImagePart(), TextPart(text="Which digits are these?")))
ASKED = Prompt(row_id="r", messages=(QUESTION,), image_hashes=(content_hash(FIRST),))


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> PromptProcessor:
    return PromptProcessor(ModelConfig(path=str(make_family("qwen2_vl", tmp_path_factory.mktemp("history")))))


def rule(**changes: object) -> ConversationLimits:
    return ConversationLimits.model_validate({"turns": 9, "tokens_per_turn": 99, "images": 9, **changes})


def tool(*parts: Part) -> Observation:
    return Observation((Message("tool", parts),))


def sampled(processor: PromptProcessor, text: str) -> np.ndarray:
    return np.asarray(processor.tokenize_completion(text), np.int32)


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("<think>a b</think>answer 1", "answer 1"),
        ("<think>a</think>\n\nanswer 1", "answer 1"),
        ("first <think>a</think> answer 1", " answer 1"),
        ("<think>a</think>b</think>answer 1", "answer 1"),
        ("<think>a</think>", ""),
        ("a b</think>\nanswer 1", "</think>\nanswer 1"),
        ("answer 1", "answer 1"),
        ("<think>answer 1", "<think>answer 1"),
    ],
)
def test_what_was_thought_goes_and_what_was_answered_stays(processor: PromptProcessor, said: str, kept: str) -> None:
    """Where no `<think>` was sampled, the prompt has opened the thinking, and it is closed. The stop token stays."""
    left = without_thinking(sampled(processor, said), processor)
    assert processor.tokenizer.decode(left.tolist()) == kept + processor.tokenizer.eos_token


def test_an_answer_keeps_the_tokens_that_were_sampled(processor: PromptProcessor) -> None:
    """Its text would be tokenised otherwise; of a token that ends the tag and begins the answer, only that part is."""
    letters = [token for letter in "answer" for token in processor.tokenize(letter)]
    assert letters != processor.tokenize("answer")
    turn = np.asarray([*processor.tokenize("<think>a</think>"), *letters], np.int32)
    assert without_thinking(turn, processor).tolist() == letters

    other = PromptProcessor.__new__(PromptProcessor)
    other.tokenizer = build_tokenizer(">! >! >!")
    other.tokenize = lambda text: other.tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[method-assign]
    ids = other.tokenize("<think>a</think>!answer")
    (joint,) = other.tokenize(">!")
    assert joint in ids
    assert without_thinking(np.asarray(ids), other).tolist() == other.tokenize("!answer")


def test_a_new_segment_is_the_templates_own_conversation_of_what_is_left(processor: PromptProcessor) -> None:
    stops = (processor.tokenizer.eos_token_id, processor.tokenizer.pad_token_id)
    bridge = TurnBridge(processor, stops)
    for settings, texts, starts in (
        ({"history": "strip_thinking"}, ("answer 1", "read 2"), [True, True]),
        ({"keep_images": 1}, ("<think>a</think>answer 1", "<think>a</think>read 2"), [False, True]),
        ({"history": "strip_thinking", "keep_images": 1}, ("answer 1", "read 2"), [True, True]),
        ({"keep_images": 2}, ("<think>a</think>answer 1", "<think>a</think>read 2"), [False, False]),
    ):
        history, begun = History(bridge, rule(**settings), ASKED, pixels=True), []
        for text, image in (("<think>a</think>answer 1", SECOND), ("<think>a</think>read 2", THIRD)):
            history.add_turn(sampled(processor, text))
            shown = history.after(tool("see", image))
            history.show(tool("see", image), shown)
            begun.append(shown.begins_segment)
        assert begun == starts
        kept = [SECOND, THIRD][-settings["keep_images"] if "keep_images" in settings else 0 :]  # type: ignore[operator]
        messages: list[ChatMessage] = [QUESTION]
        for text, image in zip(texts, (SECOND, THIRD), strict=True):
            messages.append(ChatMessage(role="assistant", content=(TextPart(text=text),)))
            seen = ImagePart() if image in kept else TextPart(text=LEFT_OUT)
            messages.append(ChatMessage(role="tool", content=(TextPart(text="see"), seen)))
        images = {content_hash(image): image for image in (FIRST, *kept)}
        whole = processor.encode(Prompt(row_id="r", messages=tuple(messages), image_hashes=tuple(images)), images)
        row = processor.encode(ASKED, images).followed_by(history.pieces)
        assert processor.tokenizer.decode(row.token_ids) == processor.tokenizer.decode(whole.token_ids)
        assert row.token_ids.tolist() == whole.token_ids.tolist()
        assert row.image_hashes == whole.image_hashes
        assert row.images == whole.images == (FIRST, *kept)
        assert row.pixel_values is not None
        assert whole.pixel_values is not None
        assert row.pixel_values.equal(whole.pixel_values)


def joined_ids(history: History) -> list[int]:
    return [token for piece in history.pieces for token in piece.token_ids.tolist()]


def test_the_newest_observation_is_shown_whole_and_older_images_give_way(processor: PromptProcessor) -> None:
    history = History(
        TurnBridge(processor, (processor.tokenizer.eos_token_id,)), rule(keep_images=2), ASKED, pixels=False
    )
    told: list[tuple[list[bytes], bool]] = []
    for observation in (tool(FIRST), tool("nothing"), tool(SECOND), tool(FIRST, SECOND, THIRD), tool("nothing")):
        history.add_turn(sampled(processor, "answer 1"))
        shown = history.after(observation)
        history.show(observation, shown)
        told.append(([image for piece in history.pieces for image in piece.images], shown.begins_segment))
    assert told == [
        ([FIRST], False),
        ([FIRST], False),
        ([FIRST, SECOND], False),
        ([FIRST, SECOND, THIRD], True),
        ([SECOND, THIRD], True),
    ]


def test_images_are_left_out_from_the_oldest_on_across_messages() -> None:
    both = Observation((Message("tool", ("a", FIRST, SECOND)), Message("user", (THIRD, "b"))))
    assert without_images(both, 2) == Observation(
        (Message("tool", ("a", LEFT_OUT, LEFT_OUT)), Message("user", (THIRD, "b")))
    )
    assert without_images(both, 0) is both


def test_an_environment_may_leave_turns_out_and_change_what_it_had_shown(processor: PromptProcessor) -> None:
    """What stays keeps its sampled tokens, and the conversation goes on from the edited history."""
    bridge = TurnBridge(processor, (processor.tokenizer.eos_token_id,))
    history = History(bridge, rule(), ASKED, pixels=False)
    turns = [sampled(processor, f"answer {number}") for number in range(4)]
    for number, edited in enumerate(
        ((), (), (PastTurn(None, "read <|image_pad|>", tool("old")), PastTurn(1), PastTurn(2)), ())
    ):
        history.add_turn(turns[number])
        observation = tool(f"{number}", FIRST)
        shown = history.after(observation, edited)
        history.show(observation, shown)
        assert shown.begins_segment == bool(edited)
    row = history.pieces[0].followed_by(history.pieces[1:])
    assert row.unexpanded_ids is not None
    said = processor.tokenizer.decode(row.unexpanded_ids)
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert said.replace("<|im_start|>", "").replace("<|im_end|>", "") == (
        f"read < |image_pad|>\ntool\nold\nassistant\nanswer 1\ntool\n1{image}\nassistant\nanswer 2\ntool\n2{image}\n"
        f"assistant\nanswer 3\ntool\n3{image}\nassistant\n"
    )
    same = (PastTurn(None, "read <|image_pad|>", tool("old")), PastTurn(1), PastTurn(2), PastTurn(3), PastTurn(4))
    history.add_turn(sampled(processor, "answer 4"))
    assert not history.after(tool("so"), same).begins_segment, "it is what the segment holds"


@pytest.mark.parametrize(
    ("edited", "reason"),
    [
        ((PastTurn(7),), "has turn 7, and 2 were taken"),
        ((PastTurn(None, "a"), PastTurn(1)), "nothing follows turn 0"),
        ((PastTurn(1), PastTurn(0)), "nothing follows turn 0"),
        ((PastTurn(0, shown=tool(SECOND)), PastTurn(1)), "shows an image that no observation has shown"),
        ((PastTurn(0), PastTurn(1, shown=tool("b"))), "has an observation beside the new one"),
    ],
)
def test_an_edited_history_that_cannot_be_is_refused(
    processor: PromptProcessor, edited: tuple[PastTurn, ...], reason: str
) -> None:
    history = History(TurnBridge(processor, (processor.tokenizer.eos_token_id,)), rule(), ASKED, pixels=False)
    history.add_turn(sampled(processor, "answer 1"))
    history.show(tool(FIRST), history.after(tool(FIRST)))
    history.add_turn(sampled(processor, "answer 2"))
    with pytest.raises(UserError, match=reason):
        history.after(tool("so"), edited)
