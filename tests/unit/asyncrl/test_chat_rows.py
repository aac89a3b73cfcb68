"""Chat messages of a row become the prompt that they say: their own images, tool calls, the template, the turns."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from asyncrl.config.sections import DataConfig
from asyncrl.data.dataset import open_train
from asyncrl.data.images import content_hash
from asyncrl.data.prompts import PromptRenderer, RenderedPrompt
from asyncrl.errors import UserError
from asyncrl.rewards.sample import sample_of
from tests.rigs.pictures import picture

IMAGES = {name: picture(*size) for name, size in {"a.png": (40, 30), "b.png": (28, 60), "c.png": (33, 33)}.items()}


def rendered(row: dict[str, Any], folder: Path | None = None, **changes: Any) -> RenderedPrompt:
    config = DataConfig(train_files=("x",), image_dir=str(folder or ""), **changes)
    return PromptRenderer(config).render(row, "d:0")


def asked(*parts: Any, before: Sequence[Any] = ()) -> dict[str, Any]:
    return {"prompt": [*before, {"role": "user", "content": list(parts)}], "answer": "1"}


def messages_of(one: RenderedPrompt) -> list[dict[str, Any]]:
    return sample_of(one.prompt, "", one.blobs, "stop", num_tokens=1, max_tokens=8).messages


def texts(one: RenderedPrompt) -> list[str]:
    return [message["content"] for message in messages_of(one)]


def shown(one: RenderedPrompt) -> list[bytes]:
    return [one.blobs[digest] for digest in one.prompt.image_hashes]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in IMAGES.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


# --- images in parts -------------------------------------------------------------------------------

B64 = base64.b64encode(IMAGES["b.png"]).decode()
HELD = {
    "image": {"type": "image", "image": "b.png"},
    "image without a type": {"image": "b.png"},
    "file address": {"type": "image", "image": "file://b.png"},
    "path": {"type": "image", "path": "b.png"},
    "url": {"type": "image", "url": f"data:image/png;base64,{B64}"},
    "base64": {"type": "image", "base64": B64},
    "bytes": {"type": "image", "bytes": IMAGES["b.png"], "path": "gone.png"},
    "struct": {"type": "image", "image": {"bytes": IMAGES["b.png"], "path": None}, "text": None},
    "image_url": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{B64}", "detail": "high"}},
    "image_url as text": {"type": "image_url", "image_url": "b.png"},
    "input_image": {"type": "input_image", "image_url": f"data:image/png;base64,{B64}"},
    "source": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": B64}},
}


@pytest.mark.parametrize("form", HELD)
def test_the_image_of_a_part_is_shown_where_the_part_stands(form: str, folder: Path) -> None:
    before = [
        {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "This?"}]},
        {"role": "assistant", "content": "A digit."},
    ]
    row = asked({"type": "text", "text": "And "}, HELD[form], {"type": "image", "image": "c.png"}, before=before)
    for one in (rendered(row, folder), rendered({**row, "images": []}, folder), rendered(row, folder, image_key="")):
        assert shown(one) == [IMAGES["a.png"], IMAGES["b.png"], IMAGES["c.png"]]
        assert texts(one) == ["<image>This?", "A digit.", "And <image><image>"]


def test_an_image_of_pillow_in_a_part_is_shown() -> None:
    (data,) = shown(rendered(asked({"type": "image", "image": Image.new("RGB", (5, 7), "red")})))
    assert data.startswith(b"\x89PNG")


def test_parts_of_data_files_are_read_below_the_file(folder: Path) -> None:
    """So also JSON text of messages, and Parquet, which fills keys of other parts with null."""
    parts = [{"type": "image", "image": "b.png"}, {"type": "text", "text": "or"}, {"type": "image", "image": "a.png"}]
    row = asked(*parts)
    (folder / "d.jsonl").write_text(json.dumps(row))
    (folder / "t.jsonl").write_text(json.dumps({**row, "prompt": json.dumps(row["prompt"])}))
    pq.write_table(pa.Table.from_pylist([row]), folder / "d.parquet")
    for name in ("d.jsonl", "t.jsonl", "d.parquet"):
        config = DataConfig(train_files=(str(folder / name),))
        read = open_train(config)[0]
        assert read["images"] == [str(folder / "b.png"), str(folder / "a.png")], "as the survey and the learner see it"
        one = PromptRenderer(config).render(read, "d:0")
        assert shown(one) == [IMAGES["b.png"], IMAGES["a.png"]]
        assert texts(one) == ["<image>or<image>"]
        assert one.prompt.columns == {}


def test_frames_of_a_part_are_a_video(folder: Path) -> None:
    one = rendered(asked({"type": "video", "video": ["a.png", "file://c.png"]}, {"type": "text", "text": "?"}), folder)
    assert [video.frame_hashes for video in one.prompt.videos] == [
        tuple(content_hash(IMAGES[name]) for name in ("a.png", "c.png"))
    ]
    assert texts(one) == ["<video>?"]


IMAGE_A = {"type": "image", "image": "a.png"}
AMBIGUOUS = {
    "both": ({**asked(IMAGE_A), "images": ["b.png"]}, r"own image, and column 'images' \(data.image_key\) holds some"),
    "both, the same": ({**asked(IMAGE_A), "images": ["a.png"]}, "Keep one of them"),
    "video and column": ({**asked({"video": ["a.png"]}), "videos": [["b.png"]]}, r"column 'videos' \(data.video_key\)"),
    "one of two": (asked({"type": "image"}, IMAGE_A), r"2 <image> placeholder\(s\) in the prompt, 1 image"),
    "its size": (asked({**IMAGE_A, "max_pixels": 999}), "'max_pixels' cannot be read there. Sizes are model.min_pix"),
    "an unknown key": ({**asked({"type": "image", "picture": "a.png"}), "images": ["b.png"]}, "'picture' cannot be"),
    "two images": (asked({"type": "image", "image": "a.png", "url": "b.png"}), "'image', 'url' cannot be read"),
    "in a text": (asked({"type": "text", "text": "x", "image": "a.png"}), "has the part"),
    "an address": (asked({"type": "image", "url": "https://x.org/a.png"}), "image 0: .* is an address, not a file"),
    "gone": (asked(IMAGE_A, {"type": "image", "image": "d.png"}), "image 1: there is no image"),
    "another order": ({**asked({"type": "image", "index": 1}, {"type": "image", "index": 0}), "images": ["a.png"] * 2},
                      r"name images of the column in the order \[1, 0\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_an_image_that_would_be_passed_over_is_a_bad_row(case: str, folder: Path) -> None:
    row, expected = AMBIGUOUS[case]
    with pytest.raises(UserError, match=f"row d:0[:,] .*{expected}"):
        rendered(row, folder)


# --- data.format_prompt ----------------------------------------------------------------------------

TEMPLATE = "{{ content }} In <answer>."
EARLIER = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
ASKED = {
    "text": "<image>What?",
    "message": [{"role": "user", "content": "<image>What?"}],
    "parts": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}],
    "marked text in a part": [{"role": "user", "content": [{"type": "text", "text": "<image>What?"}]}],
    "held": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"text": "What?"}]}],
    "two texts": [{"role": "user", "content": [{"type": "image"}, {"text": "Wh"}, {"text": "at?"}]}],
}


@pytest.mark.parametrize("form", ASKED)
@pytest.mark.parametrize("earlier", [False, True])
def test_the_template_is_for_the_last_users_message_in_any_form(form: str, earlier: bool, folder: Path) -> None:
    prompt = ASKED[form]
    if earlier:
        prompt = [*EARLIER, *([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)]
    row = {"prompt": prompt, "answer": "1", "images": None if form == "held" else ["a.png"]}
    one = rendered(row, folder, format_prompt=TEMPLATE)
    assert texts(one) == [*(["Hi", "Yes?"] if earlier else []), "<image>What? In <answer>."]
    assert shown(one) == [IMAGES["a.png"]]


def test_the_template_reaches_the_user_before_a_tools_result_and_needs_one() -> None:
    tool = {"role": "tool", "content": "sunny"}
    row = {"prompt": [{"role": "user", "content": "So?"}, tool], "answer": "1"}
    assert texts(rendered(row, format_prompt=TEMPLATE)) == ["So? In <answer>.", "sunny"]
    with pytest.raises(UserError, match=r"row d:0: data.format_prompt is for the last user's message, and there is no"):
        rendered({"prompt": [tool], "answer": "1"}, format_prompt=TEMPLATE)


# --- calls of tools --------------------------------------------------------------------------------

CALL = {"type": "function", "function": {"name": "get", "arguments": {"city": "Rome"}}}
CALLS = {
    "map": CALL,
    "openai": {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"city": "Rome"}'}},
    "flat": {"name": "get", "arguments": {"city": "Rome"}},
}


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("content", ["", None, "I look.", []])
def test_tool_calls_reach_template_and_reward(form: str, content: Any) -> None:
    turn = {"role": "assistant", "content": content, "tool_calls": [CALLS[form]], "reasoning_content": "hm", "x": None}
    result = {"role": "tool", "name": "get", "tool_call_id": "c1", "content": "sunny", "tool_calls": None}
    row = asked({"text": "So?"}, before=[{"role": "user", "content": "Weather?"}, turn, result])
    _, called, answered, _ = messages_of(rendered(row))
    identity = {"id": "c1"} if form == "openai" else {}
    assert called == {
        "role": "assistant",
        "content": content or "",
        "tool_calls": [{**CALL, **identity}],
        "reasoning_content": "hm",
    }
    assert answered == {"role": "tool", "content": "sunny", "name": "get", "tool_call_id": "c1"}


MISREAD = {
    "nothing said": ({"role": "assistant", "content": None}, "a content of type NoneType; .* null beside tool_calls"),
    "no name": ({"role": "assistant", "tool_calls": [{"arguments": {}}]}, "has the tool call .*; write"),
    "cut off": ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": '}]}, "has the tool call .*"),
    "no end": ({"role": "assistant", "tool_calls": "[" * 100_000}, "tool_calls of type str; they must be a list"),
    "no list": ({"role": "assistant", "tool_calls": {"name": "f"}}, "tool_calls of type dict; they must be a list"),
    "function_call": (
        {"role": "assistant", "content": "", "function_call": CALL},
        "has a function_call, .* tool_calls",
    ),
    "bytes": ({"role": "assistant", "content": "", "note": b"x"}, "has note, which no chat template reads"),
}


@pytest.mark.parametrize("case", MISREAD)
def test_a_call_that_cannot_be_read_is_a_bad_row(case: str) -> None:
    turn, expected = MISREAD[case]
    with pytest.raises(UserError, match=f"row d:0: the assistant message has {expected}|row d:0: .*{expected}"):
        rendered(asked({"text": "So?"}, before=[turn]))


# --- turns -----------------------------------------------------------------------------------------

USER, SYSTEM = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}


def test_messages_as_json_text_are_messages() -> None:
    written = json.dumps([SYSTEM, {"role": "user", "content": [{"type": "text", "text": "Naïve?"}]}], indent=1)
    assert texts(rendered({"prompt": written, "answer": "1"})) == ["Be brief.", "Naïve?"]
    assert texts(rendered({"prompt": '[1, 2] and {"role": 1}: sort them', "answer": "1"}))[0].startswith("[1, 2]")
    for text in (repr([USER]), written[:-4]):
        with pytest.raises(UserError, match=r"column 'prompt' .* begins like a list of chat messages, .* is no JSON"):
            rendered({"prompt": text, "answer": "1"})
    with pytest.raises(UserError, match="a chat message has role None; use system"):
        rendered({"prompt": '[{"from": "human", "value": "Hi"}]', "answer": "1"})


@pytest.mark.parametrize(
    ("messages", "changes", "expected"),
    [
        ([USER, {"role": "assistant", "content": "The answer is"}], {}, "ends with the assistant's turn 'The answer"),
        ([USER, {"role": "assistant", "tool_calls": [CALL]}], {}, "ends with the assistant's turn ''"),
        ([SYSTEM, USER], {"system_prompt": "Be long."}, "a system message comes first, and this prompt has one"),
        ([SYSTEM, SYSTEM, USER], {}, "a system message comes first"),
        ([USER, SYSTEM], {}, "a system message comes first"),
    ],
)
def test_turns_that_a_template_would_misplace_are_a_bad_row(
    messages: list[dict[str, Any]], changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError, match=f"row d:0: .*{expected}"):
        rendered({"prompt": messages, "answer": "1"}, **changes)
