"""Tools: schemas from functions, arguments, results; and the call formats."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from functools import reduce
from typing import Any, Literal

import pytest
from PIL import Image
from pydantic import BaseModel

from asyncrl.environments.image_rule import ImageRule
from asyncrl.environments.interface import Action, EpisodeOver, Start, ToolError, png_bytes
from asyncrl.environments.observation import StepResult
from asyncrl.errors import UserError
from asyncrl_plugins.tools.calculator import calculator
from asyncrl_plugins.tools.call_formats import Call, check_format, example_call, parse_calls
from asyncrl_plugins.tools.environment import ToolContext, ToolEnvironment, tool
from asyncrl_plugins.tools.schema import tool_of


class Point(BaseModel):
    x: int
    y: int = 0


def crop(box: tuple[float, float, float, float], image: int = 0, *, ctx: ToolContext) -> Image.Image:
    """Show a part of an image larger.

    box: left, top, right, bottom
        as fractions of the image.
    image: number of the image, 0 is the first one.
    """
    shown = ctx.image(image)
    width, height = shown.size
    return shown.pixels.crop((int(box[0] * width), int(box[1] * height), int(box[2] * width), int(box[3] * height)))


async def search(query: str, kind: Literal["web", "image"] = "web", at: Point | None = None) -> list[str]:
    """Look something up.

    Args:
        query (str): what to look for.
        kind: of what.
        at: where.

    Returns:
        query: of no parameter.
    """
    return [f"{kind}: {query}", str(at.x if at else None)]


SCHEMAS = {each.__name__: tool_of(each).parameters for each in (crop, search)}


def test_a_schema_is_derived_from_annotations_and_docstring() -> None:
    made = tool_of(crop)
    assert made.takes_context
    assert made.description == "Show a part of an image larger."
    number = {"type": "number"}
    assert made.schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "box": {
                "description": "left, top, right, bottom as fractions of the image.",
                "type": "array",
                "prefixItems": [number] * 4,
                "minItems": 4,
                "maxItems": 4,
            },
            "image": {"description": "number of the image, 0 is the first one.", "type": "integer", "default": 0},
        },
        "required": ["box"],
    }
    schema = tool_of(search).parameters
    assert schema["properties"]["query"] == {"description": "what to look for.", "type": "string"}
    assert schema["properties"]["kind"]["enum"] == ["web", "image"]


def no_annotation(a):  # type: ignore[no-untyped-def]
    """Do it.

    a: it.
    """


def bad_annotation(a: list[complex]) -> None:
    """Do it.

    a: it.
    """


def no_description(a: int) -> None:
    """Do it."""


def no_docstring() -> None: ...


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (no_annotation, "parameter 'a' has no annotation. Write its type"),
        (bad_annotation, "parameter 'a' has the annotation complex, of which there is no JSON"),
        (no_description, "parameter 'a' has no description. Add a line `a: ...` to the docstring"),
        (no_docstring, "has no docstring"),
    ],
)
def test_a_function_without_a_schema_is_refused_with_its_line(function: Callable[..., Any], problem: str) -> None:
    with pytest.raises(UserError) as refused:
        tool_of(function)
    line = function.__code__.co_firstlineno
    assert str(refused.value).startswith(f"{__file__}:{line}: tool {function.__name__}")
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "crop: parameter 'box' is missing"),
        ({"box": [0, 0, 1]}, "crop: parameter 'box.3' is missing"),
        ({"box": [0, 0, 1, "1"]}, """parameter 'box.3' is "1": input should be a valid number"""),
        ({"box": [0, 0, 1, 1], "image": 1.5}, "parameter 'image' is 1.5: input should be a valid integer"),
        ({"box": [0, 0, 1, 1], "image": True}, "parameter 'image' is true: input should be a valid integer"),
        ({"box": [0, 0, 1, 1], "imag": 0}, "there is no parameter 'imag'. Did you mean 'image'?"),
    ],
)
def test_wrong_arguments_are_named_before_the_call(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ToolError) as wrong:
        tool_of(crop).validate(arguments)
    assert problem in str(wrong.value)


def called(*expected: tuple[str, dict[str, Any]]) -> tuple[Call, ...]:
    return tuple(Call(str(i), name, arguments) for i, (name, arguments) in enumerate(expected))


def hermes(value: Any) -> str:
    return f"<tool_call>\n{json.dumps(value)}\n</tool_call>"


def nested(depth: int) -> list[Any]:
    return reduce(lambda inner, _: [inner], range(depth - 1), [])


GOOD = {"name": "crop", "arguments": {"box": [0, 0, 1, 1]}}


@pytest.mark.parametrize(
    ("call_format", "text", "calls"),
    [
        ("hermes", f"First {hermes(GOOD)} then {hermes(GOOD)}", [("crop", GOOD["arguments"])] * 2),
        ("hermes", "the answer is 4", []),
        ("hermes", f"<think>{hermes(GOOD)}</think>4", []),
        ("hermes", f"<think>{hermes(GOOD)}", []),
        (
            "qwen_xml",
            "<tool_call>\n<function=search>\n<parameter=query>\n12\n</parameter>\n</function>\n</tool_call>",
            [("search", {"query": "12"})],
        ),
        (
            "qwen_xml",
            "<tool_call><function=crop><parameter=box>[0, 0, 1, 1]</parameter><parameter=image>2</parameter>"
            "</function></tool_call>",
            [("crop", {"box": [0, 0, 1, 1], "image": 2})],
        ),
        ("tag:one", "I look. <one> a < b </one>", [("one", {"query": "a < b"})]),
        ("python", "So:\n```python\nprint(1)\n```\n", [("python", {"code": "print(1)\n"})]),
        ("python", "<code>\nprint(1)\n</code>", [("python", {"code": "print(1)"})]),
        ("plain", " go 3 -5\n", [("go", {"x": 3, "y": -5})]),
        ("plain", 'one "37 * 46"', [("one", {"query": "37 * 46"})]),
        ("plain", "go three", [("go", {"x": "three"})]),
        ("plain", "I do not know", []),
        ("none", hermes(GOOD), []),
    ],
)
def test_calls_are_read_as_they_are_written(call_format: str, text: str, calls: list[Any]) -> None:
    number, text_ = {"type": "integer"}, {"type": "string"}
    schemas = SCHEMAS | {
        "go": {"properties": {"x": number, "y": number}},
        "one": {"properties": {"query": text_}},
        "python": {"properties": {"code": text_}},
    }
    assert parse_calls(call_format, text, schemas) == called(*calls)


@pytest.mark.parametrize(
    ("call_format", "text", "error"),
    [
        ("hermes", '<tool_call>{"name": "crop", "arguments": {"box": [0,', "at character 0: <tool_call> without"),
        ("hermes", 'x<tool_call>{"name": "crop", }</tool_call>', "at character 29: no JSON"),
        ("hermes", hermes({"name": "crop"}), 'at character 11: "arguments" is missing'),
        ("hermes", hermes({"name": "crop", "arguments": "{}"}), '"arguments" is no object'),
        ("hermes", hermes([1]), 'expected {"name": ...'),
        ("hermes", hermes(GOOD | {"id": 1}), "unknown key 'id'"),
        ("hermes", '<tool_call>{"name": "a", "name": "b", "arguments": {}}</tool_call>', "'name' is given twice"),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "NaN is no JSON"),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "no JSON"),
        ("hermes", hermes({"name": "crop", "arguments": {"box": nested(100)}}), "nested more than 64 deep"),
        ("hermes", hermes({"name": "crop", "arguments": {"box": nested(900)}}), "nested more than 64 deep"),
        ("qwen_xml", "<tool_call>crop</tool_call>", "at character 11: expected <function=NAME>"),
        (
            "qwen_xml",
            "<tool_call><function=crop>4</function></tool_call>",
            "at character 26: expected <parameter=NAME>",
        ),
        ("plain", "search 'x", "at character 0: no closing quotation"),
        ("plain", " search a b c d", "at character 1: 4 arguments, expected `search QUERY KIND AT`"),
        ("plain", "search a\nsearch b", "at character 8: a call is one line"),
    ],
)
def test_what_is_no_call_is_an_error_with_its_position(call_format: str, text: str, error: str) -> None:
    (call,) = parse_calls(call_format, text, SCHEMAS)
    assert call.error.startswith("malformed call ")
    assert error in call.error
    assert call.arguments == {}


@pytest.mark.parametrize(
    ("call_format", "problem"),
    [
        ("hermse", "Did you mean 'hermes'?"),
        ("tag", "There are tool_call, hermes, qwen_xml, tag:<name>"),
        ("tag:answer", "there is no tool 'answer'"),
        ("tag:crop", "one argument, a string"),
        ("python", "there is no tool 'python'"),
        ("plain", "'box' of tool crop is not one word"),
    ],
)
def test_a_format_that_cannot_express_the_tools_is_refused(call_format: str, problem: str) -> None:
    with pytest.raises(UserError) as refused:
        check_format(call_format, SCHEMAS)
    assert problem in str(refused.value)


class Desk(ToolEnvironment):
    functions = (crop, search)

    @tool
    def count(self, *, ctx: ToolContext) -> int:
        """Count the calls of this tool."""
        ctx.state["count"] = ctx.state.get("count", 0) + 1
        ctx.reward += 0.25
        return ctx.state["count"]

    @tool
    def finish(self) -> None:
        """End the episode."""
        raise EpisodeOver(1.0, {"found": True})

    @tool
    def broken(self) -> object:
        """Return what is nothing."""
        return object()


def action(*calls: tuple[str, dict[str, Any]]) -> Action:
    return Action("".join(hermes({"name": name, "arguments": arguments}) for name, arguments in calls))


def play(*calls: tuple[str, dict[str, Any]], images: tuple[bytes, ...] = ()) -> tuple[Desk, StepResult]:
    async def run() -> tuple[Desk, StepResult]:
        await Desk.prepare(None, ImageRule())
        desk = Desk()
        await desk.begin(Start(images=list(images), seed=3))
        return desk, await desk.step(action(*calls))

    return asyncio.run(run())


def texts(result: StepResult) -> list[object]:
    assert result.observation is not None
    return [part for message in result.observation.messages for part in message.parts]


def test_each_call_of_a_turn_gets_a_message_and_rewards_add_up() -> None:
    _, result = play(("count", {}), ("count", {}), ("search", {"query": "x"}), ("cuont", {}), ("count", {}))
    assert texts(result)[:4] == ["1", "2", "web: x", "None"]
    assert texts(result)[4] == (
        "Error: there is no tool 'cuont'. Did you mean 'count'? Tools: count, finish, broken, crop, search"
    )
    assert texts(result)[5] == "Error: not run: a turn may have 4 calls"
    assert result.reward == 0.5
    assert [each["output"] for each in result.info["calls"]] == ["text"] * 3 + ["error"] * 2  # type: ignore[attr-defined]
    assert [each["kind"] for each in result.info["calls"]] == ["", "", "", "unknown_tool", "not_run"]  # type: ignore[attr-defined]
    _, result = play(("count", {}), ("finish", {}), ("count", {}))
    assert (result.done, result.reward, result.info["found"]) == (True, 1.25, True)
    _, result = play()
    assert (result.done, result.reward) == (True, 0.0)
    with pytest.raises(TypeError, match="tool broken returned object, of which no text or image can be made"):
        play(("broken", {}))


@pytest.mark.parametrize(
    "call",
    [("cuont", {}), ("search", {"qury": "x"}), ("crop", {"box": [0, 0, 1, 1], "image": 7})],
    ids=["unknown tool", "arguments", "image number"],
)
def test_words_of_our_own_are_marked_so_that_no_limit_cuts_them(call: tuple[str, dict[str, Any]]) -> None:
    _, result = play(call, ("search", {"query": "x"}))
    assert result.observation is not None
    assert [message.own for message in result.observation.messages] == [(0,), ()]


def test_a_call_with_many_mistakes_gets_a_short_answer() -> None:
    _, result = play(("search", {f"{'long' * 50} {number}": 1 for number in range(99)}))
    (told,) = texts(result)
    assert str(told).endswith("; and 96 more")
    assert len(str(told)) < 900


def test_images_have_numbers_and_the_rule_of_sizes_holds_before_they_are_shown() -> None:
    photo = png_bytes(Image.linear_gradient("L").resize((200, 100)))
    desk, result = play(
        ("crop", {"box": [0, 0, 0.005, 0.01]}),
        ("crop", {"box": [0, 0, 1, 1], "image": 1}),
        ("crop", {"box": [0, 0, 1, 1], "image": 7}),
        images=(photo,),
    )
    one, again, error = texts(result)
    assert isinstance(one, bytes)
    assert Image.open(io.BytesIO(one)).size == (56, 56), "a single pixel is enlarged"
    assert again == one
    assert error == "Error: there is no image 7: numbers are 0 to 2"
    assert [image.size for image in desk.ctx.images] == [(200, 100), (56, 56), (56, 56)]
    only = {"box": [0, 0, 0.005, 0.01]}
    keys = [play(("crop", box), images=(photo,))[1].state_key for box in (only, only, {"box": [0, 0, 1, 1]})]
    assert keys[0] == keys[1] != keys[2], "states that look alike are one state"
    assert len(keys[0]) == 16


class Notes:
    """A tool set: each trajectory has an object of its own."""

    def start(self, ctx: ToolContext) -> None:
        self.lines = [str(ctx.row["title"])]

    @tool
    async def note(self, line: str) -> str:
        """Write a line down.

        line: the text.
        """
        self.lines.append(line)
        return " / ".join(self.lines)


def test_a_tool_set_has_an_object_for_each_trajectory_and_a_turn_without_a_call_is_asked_for_one_once() -> None:
    class Desk(ToolEnvironment):
        functions = (Notes,)
        end = "nudge"

    async def run() -> None:
        assert [each.name for each in await Desk.list_tools({})] == ["note"]
        await Desk.prepare(None, ImageRule())
        one, other = Desk(), Desk()
        for desk in (one, other):
            await desk.begin(Start({"title": "list"}))
        for line, seen in (("a", "list / a"), ("b", "list / a / b")):
            assert texts(await one.step(action(("note", {"line": line})))) == [seen]
        assert texts(await other.step(action(("note", {"line": "c"})))) == ["list / c"]
        asked = await one.step(Action("hm"))
        assert not asked.done
        assert asked.observation is not None
        assert asked.observation.messages[0].role == "user"
        assert (await one.step(Action("still hm"))).done, "once only"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(37 + 4) * -2", -82),
        ("7 // 2 + 2 ** 3 % 5", 6),
        ("1 / 4", 0.25),
        ("9 ** 9 ** 9", "too large"),
        ("2 ** 4000 * 2 ** 4000", "too large"),
        ("1 / 0", "division by zero"),
        ("1e308 * 10", "no finite number"),
        ("__import__('os').getpid()", "no arithmetic expression"),
        ("3 +", "no arithmetic expression"),
        ("True + 1", "no arithmetic expression"),
        ("(-8) ** 0.5", "no finite number"),
        ("-" * 100_000 + "1", "no arithmetic expression"),
    ],
)
def test_the_calculator_reckons_and_runs_nothing(expression: str, value: float | str) -> None:
    if isinstance(value, str):
        with pytest.raises(ToolError, match=value):
            calculator(expression)
    else:
        assert calculator(expression) == value


@pytest.mark.parametrize("call_format", ["tool_call", "hermes", "qwen_xml", "plain"])
def test_an_example_of_a_call_is_one(call_format: str) -> None:
    def turn(way: Literal["left", "right"], steps: int, name: str, far: bool = False) -> str:
        """Turn.

        way: where to.
        steps: how often.
        name: of whom.
        far: whether far.
        """
        return ""

    made = tool_of(turn)
    (call,) = parse_calls(call_format, example_call(call_format, {"turn": made.parameters}), {"turn": made.parameters})
    assert made.validate(call.arguments) == {"way": "left", "steps": 0, "name": "text", "far": False}
