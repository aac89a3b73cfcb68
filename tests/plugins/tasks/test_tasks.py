"""Rewards of the task library, case by case, each computed by hand; and what other frameworks got wrong in them."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from asyncrl.errors import UserError
from asyncrl.rewards.sample import RewardSample
from asyncrl.user_functions import load_module
from asyncrl_plugins.tasks.completions import think_boxed, think_then
from asyncrl_plugins.tasks.counting import count
from asyncrl_plugins.tasks.detection import detections
from asyncrl_plugins.tasks.grounding import box
from asyncrl_plugins.tasks.gui import gui_format, gui_step
from asyncrl_plugins.tasks.mat import code_step, search_step
from asyncrl_plugins.tasks.text_match import exact, token_f1
from tests.rigs.tiny import ROOT

needs_math_verify = pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is not installed")


def score(function: Callable[..., Any], completion: str, answer: Any = None, /, **kwargs: Any) -> Any:
    columns = kwargs.pop("columns", {})
    images = kwargs.pop("images", [])
    return function(RewardSample(completion=completion, answer=answer, columns=columns, images=images), **kwargs)


def close(found: Mapping[str, float], **expected: float) -> None:
    assert {name: found[name] for name in expected} == pytest.approx(expected)


# --- formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("<think>a</think><answer>7</answer>", 1),
        (" <think>a\nb</think>\n<answer>\n7</answer>\n", 1),
        ("<answer>7</answer>", 0),
        ("<think></think><answer>7</answer>", 0),
        ("<think>a</think><answer> </answer>", 0),
        ("<think>a</think>so <answer>7</answer>", 0),
        ("<think>a</think><answer>7</answer>.", 0),
        ("<think>a</think><answer>7", 0),
        ("<think>a</think><answer>7</answer><answer>8</answer>", 0),
        ("<think>a <answer>7</answer></think><answer>7</answer>", 0),
        ("<think>a<think>b</think><answer>7</answer>", 0),
        ("<think>a</think><search>7</search>", 0),
        ("<anything begins with a bracket", 0),  # RLLaVA's pattern for boxes accepts it
    ],
)
def test_thinking_and_an_answer(completion: str, right: int) -> None:
    assert score(think_then, completion) == right


def test_thinking_and_one_of_several_actions() -> None:
    blocks = ["search", "answer"]
    assert score(think_then, "<think>a</think><search>q</search>", blocks=blocks) == 1
    assert score(think_then, "<think>a</think><answer>q</answer>", blocks=blocks) == 1
    assert score(think_then, "<think>a</think><search>q</search><answer>q</answer>", blocks=blocks) == 0
    assert score(think_then, "<think>a</think><search>q</answer>", blocks=blocks) == 0
    assert score(think_then, "a</think><answer>7</answer>", opened_by_prompt=True) == 1


def test_thinking_and_a_box() -> None:
    assert score(think_boxed, "<think>a</think>So \\boxed{\\frac{1}{2}}.") == 1
    assert score(think_boxed, "<think>\\boxed{2}</think>So 2.") == 0
    assert score(think_boxed, "<think>a</think>So \\boxed{2") == 0
    assert score(think_boxed, "\\boxed{2}") == 0


# --- counting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("<think>2 and 3</think><answer>5</answer>", 1),
        ("<think>2 and 3</think><answer> There are 5. </answer>", 1),
        ("<answer>5.0</answer>", 1),
        ("5", 1),
        ("<think>2 and 3</think>5", 1),
        ("<think><answer>5</answer></think><answer>4</answer>", 0),
        ("<think>5</think>", 0),
        ("<answer>4 or 5</answer>", 0),
        ("<answer>1 2 3 4 5 6</answer>", 0),
        ("<answer>15</answer>", 0),
        ("<answer>-5</answer>", 0),
        ("<answer>five</answer>", 0),
    ],
)
@pytest.mark.parametrize("answer", ["5", 5, "<answer> 5 </answer>"])
def test_counting(completion: str, right: int, answer: Any) -> None:
    assert score(count, completion, answer) == right


def test_a_reference_that_is_no_number_is_a_broken_row() -> None:
    for answer in ("many", "4 or 5", None):
        with pytest.raises(ValueError, match=r"row .*answer"):
            score(count, "<answer>5</answer>", answer)


# --- grounding ------------------------------------------------------------------------------------

WHOLE = [0, 0, 1000, 1000]


@pytest.mark.parametrize(
    ("completion", "answer", "iou"),
    [
        ("<answer>[0, 0, 1000, 1000]</answer>", WHOLE, 1),
        ("<answer>[0, 0, 500, 1000]</answer>", WHOLE, 1 / 2),
        ("<answer>(0, 0, 500, 1000)</answer>", WHOLE, 1 / 2),
        ("<answer>(0,0),(500,1000)</answer>", WHOLE, 1 / 2),
        ('<answer>[{"bbox_2d": [0, 0, 500, 1000]}]</answer>', WHOLE, 1 / 2),
        ("<answer>[0, 0, 500.0, 1e3]</answer>", WHOLE, 0),  # no way to write a coordinate
        ("<answer>[0, 0, 200, 200]</answer>", "[100, 100, 300, 300]", 1 / 7),
        ("<answer>[500, 0, 0, 1000]</answer>", WHOLE, 0),  # corners exchanged
        ("<answer>[5, 5, 5, 5]</answer>", WHOLE, 0),  # RLLaVA divides by zero where both have no area
        ("<answer>[0, 0, 1000]</answer>", WHOLE, 0),
        ("<answer>none</answer>", WHOLE, 0),
        ("<answer>[0, 0, 100, 1000] or [0, 0, 1000, 1000]</answer>", WHOLE, 1 / 10),
        # RLLaVA reads the first four numbers wherever they stand.
        ("<think>[0, 0, 1000, 1000]</think><answer>[0, 0, 500, 1000]</answer>", WHOLE, 1 / 2),
        ("<think>[0, 0, 1000, 1000]</think>", WHOLE, 0),
        ("[0, 0, 1000, 1000]", WHOLE, 0),
    ],
)
def test_the_box_of_the_answer(completion: str, answer: Any, iou: float) -> None:
    close(score(box, completion, answer), iou=iou, iou_squared=iou**2)


def test_thresholds_and_centre() -> None:
    found = score(box, "<answer>[0, 0, 500, 1000]</answer>", WHOLE)
    close(found, iou_10=1, iou_30=1, iou_50=1, iou_75=0, iou_95=0, centre=1)
    close(score(box, "<answer>[0, 0, 400, 400]</answer>", [300, 300, 400, 400]), iou=1 / 16, centre=0)
    close(score(box, "no box", [0, 0, 10, 10]), iou=0, centre=0)


def test_units_of_coordinates() -> None:
    """RLLaVA multiplies by 1000 unless a special token stands there, which decoding has removed."""
    half = "<answer>[0, 0, 0.5, 1]</answer>"
    close(score(box, half, WHOLE, scale=1), iou=1 / 2)
    close(score(box, half, WHOLE), iou=0.5e-6)
    close(score(box, half, [0, 0, 1, 1], scale=1, answer_scale=1), iou=1 / 2)
    close(score(box, "<answer>[0, 0, 100, 25]</answer>", WHOLE, scale="pixels", images=[png(200, 50)]), iou=1 / 4)
    with pytest.raises(ValueError, match="there is no image"):
        score(box, "<answer>[0, 0, 100, 25]</answer>", WHOLE, scale="pixels")


@pytest.mark.parametrize("answer", [None, [1, 2, 3], [0, 0, 0, 0], "somewhere", [0, 0, "1", 1], "__import__('os')"])
def test_a_reference_without_a_box_is_a_broken_row(answer: Any) -> None:
    with pytest.raises(ValueError, match="expected a box"):
        score(box, "<answer>[0, 0, 1, 1]</answer>", answer)


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


# --- detection ------------------------------------------------------------------------------------

ONE = "<answer>[{'Position': [0, 0, 10, 10], 'Confidence': 1.0}]</answer>"
TWO = "<answer>[{'Position': [0, 0, 10, 10], 'Confidence': 1}, {'Position': [20, 0, 30, 10], 'Confidence': 1}]</answer>"


def found(*boxes: tuple[list[float], float]) -> str:
    return f"<answer>{[{'Position': position, 'Confidence': confidence} for position, confidence in boxes]}</answer>"


@pytest.mark.parametrize(
    ("completion", "answer", "overlap", "confidence", "precision", "recall"),
    [
        (found(([0, 0, 10, 10], 0.9)), ONE, 1, 0.9, 1, 1),
        (found(([0, 0, 10, 8], 0.9)), ONE, 0.8, 0.9, 1, 1),
        (found(([0, 0, 10, 5], 0.9)), ONE, 0, 0.1, 0, 0),  # 0.5 is not above 0.5
        (found(([0, 0, 10, 10], 0.9), ([50, 50, 60, 60], 0.3)), ONE, 0.5, 0.8, 0.5, 1),
        (found(([0, 0, 10, 10], 0.9)), TWO, 0.5, 0.9, 1, 0.5),
        # The surest takes the reference, although a less sure one agrees better.
        (found(([0, 0, 10, 10], 0.5), ([0, 0, 10, 8], 0.9)), ONE, 0.4, 0.7, 0.5, 1),
        # Once more the same box: RLLaVA drops it, here it costs.
        (found(([0, 0, 10, 10], 1), ([0, 0, 10, 10], 1)), ONE, 0.5, 0.5, 0.5, 1),
        (found(([0, 0, 10, 10], 9)), ONE, 0, 0, 0, 0),  # no confidence: it would earn 9
        (found(([10, 10, 0, 0], 0.9)), ONE, 0, 0.1, 0, 0),
        ("<answer>[]</answer>", ONE, 0, 0, 0, 0),  # RLLaVA divides by zero
        ("<answer>No Objects</answer>", "<answer>No Objects</answer>", 1, 1, 1, 1),
        (found(([0, 0, 10, 10], 0.9)), "<answer>[]</answer>", 0, 0.1, 0, 0),
        ("nothing", "<answer>[]</answer>", 0, 0, 0, 0),
        # Line breaks, JSON, and a list that is cut off.
        ('<answer>[\n {"Position": [0, 0, 10, 10],\n "Confidence": 0.9},\n {"Position": [2', ONE, 0, 0, 0, 0),
        ('<answer>[\n {"Position": [0, 0, 10, 10],\n "Confidence": 0.9}, {"Position": [2</answer>', ONE, 1, 0.9, 1, 1),
        ("<answer>[{'Position': [0, 0, 10, 10]}]</answer>", ONE, 0, 0, 0, 0),
        ("<answer>[{'Position': __import__('os').getcwd(), 'Confidence': 1}]</answer>", ONE, 0, 0, 0, 0),
        (f"<think>{ONE}</think><answer>[]</answer>", ONE, 0, 0, 0, 0),
    ],
)
def test_detection(
    completion: str, answer: Any, overlap: float, confidence: float, precision: float, recall: float
) -> None:
    expected = {"overlap": overlap, "confidence": confidence, "precision": precision, "recall": recall}
    assert score(detections, completion, answer) == pytest.approx(expected)


def test_a_reference_of_objects_without_boxes_is_a_broken_row() -> None:
    with pytest.raises(ValueError, match="a Position"):
        score(detections, ONE, "<answer>[{'box': 1}]</answer>")


# --- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "answer", "bag", "as_set", "same"),
    [
        ("The red car.", "red car", 1, 1, 1),
        ("blue car", "red car", 0.5, 0.5, 0),
        ("car red", "red car", 1, 1, 0),
        ("red car, red car", "red red car", 6 / 7, 4 / 7, 0),
        ("red red red", "red red red", 1, 1 / 3, 1),  # as sets a right answer gets a third
        ("bike", "car", 0, 0, 0),
        ("", "car", 0, 0, 0),
        ("the", "a", 1, 1, 1),
        ("北京", "北京市", 0.8, 0.8, 0),
    ],
)
def test_token_f1(given: str, answer: str, bag: float, as_set: float, same: int) -> None:
    assert token_f1(given, answer) == pytest.approx(bag)
    assert token_f1(given, answer, "set") == pytest.approx(as_set)
    assert exact(given, answer) == same


# --- steps of agents ------------------------------------------------------------------------------

QUERY = "<think>t</think>\n<search> height of the Eiffel tower </search>"


@pytest.mark.parametrize(
    ("completion", "answer", "step", "same"),
    [
        ("<think>t</think><search>Eiffel tower height</search>", QUERY, 6 / 7, 0),
        ("<think>t</think><search>height of the Eiffel Tower</search>", QUERY, 1, 1),
        ("<think>t</think><search>Eiffel</search>", QUERY, 0, 0),  # F1 0.4 is below 0.5
        ("<think>t</think><answer>height of the Eiffel tower</answer>", QUERY, 0, 0),
        ("<think>t</think><search>height of Eiffel tower</search><answer>3</answer>", QUERY, 0, 0),
        ("height of the Eiffel tower", QUERY, 0, 0),
        (f"{QUERY.replace('</think>', '')}</think>", QUERY, 0, 0),  # in the thinking alone
        ("<think>t</think><answer>330 m</answer>", "<think>t</think><answer>330 metres</answer>", 0.5, 0),
        ("<think>t</think><answer>330</answer>", ["330 metres", "330"], 1, 1),
    ],
)
def test_a_step_of_search(completion: str, answer: Any, step: float, same: int) -> None:
    close(score(search_step, completion, answer), step=step, exact=same)


BOTH = "<think>t</think><problem> {'rotation90', 'dark'} </problem>"
CODE = "<think>t</think><code>```python\nx = 1\n```</code>"


@pytest.mark.parametrize(
    ("completion", "answer", "step", "same"),
    [
        # RLLaVA never sets the variable where all is right, and gives 0.
        ("<think>t</think><problem>{'dark', 'rotation90'}</problem>", BOTH, 1, 1),
        ("<think>t</think><problem>{'dark'}</problem>", "<problem>{'dark'}</problem>", 1, 1),
        ("<think>t</think><problem>{'rotation90'}</problem>", BOTH, 0.5, 0),
        ("<think>t</think><problem>{'dark'}</problem>", BOTH, 0, 0),
        ("<think>t</think><problem>{'rotation180'}</problem>", BOTH, 0, 0),
        ("<think>t</think><problem>{'rotation90', 'dark', 'blur'}</problem>", BOTH, 0, 0),
        ("<think>t</think><problem>nothing</problem>", BOTH, 0, 0),
        ("<think>t</think><code>\n```python\nimport cv2\n```\n</code>", CODE, 0.9, 0),
        (CODE, CODE, 0.9, 1),
        ("<think>t</think><code>```python\nx = = 1\n```</code>", CODE, 0, 0),
        ("<think>t</think><code>```python\n# nothing\n```</code>", CODE, 0, 0),
        ("<think>t</think><code>x = 1</code>", CODE, 0, 0),
        ("<think>t</think><answer>a red car</answer>", "<answer>the red car</answer>", 1, 1),
        ("<think>t</think><answer>red</answer>", CODE, 0, 0),
    ],
)
def test_a_step_of_code(completion: str, answer: Any, step: float, same: int) -> None:
    close(score(code_step, completion, answer), step=step, exact=same)


def test_the_code_is_not_run(tmp_path: Path) -> None:
    file = tmp_path / "made"
    close(score(code_step, f"<code>```python\nopen({str(file)!r}, 'w')\n```</code>", CODE), step=0.9)
    assert not file.exists()


def test_a_reference_of_two_actions_is_a_broken_row() -> None:
    with pytest.raises(ValueError, match="expected one action"):
        score(search_step, QUERY, f"{QUERY}<answer>3</answer>")
    with pytest.raises(ValueError, match="names of problems"):
        score(code_step, BOTH, "<problem>dark</problem>")


# --- GUI ------------------------------------------------------------------------------------------


def action(kind: str, point: Any = (500, 50), text: Any = "no input text") -> str:
    return f"<think>t</think><answer>{[{'action': kind, 'point': list(point), 'input_text': text}]}</answer>"


BUTTON, PLACE = {"gt_bbox": [0.4, 0.0, 0.6, 0.1]}, {"gt_bbox": [0.5, 0.5]}
DOWN = {"gt_bbox": [-100, -100], "gt_input_text": "down"}


@pytest.mark.parametrize(
    ("completion", "answer", "columns", "step", "kind"),
    [
        (action("click"), "click", BUTTON, 1, 1),
        (action("Click", (600, 100)), "click", BUTTON, 1, 1),
        (action("click", (601, 50)), "click", BUTTON, 0, 1),
        (action("click", (0.5, 0.05)), "click", BUTTON, 0, 1),  # fractions where thousandths were asked for
        (action("click", (500, 639)), "click", PLACE, 1, 1),
        (action("click", (500, 640)), "click", PLACE, 0, 1),  # 0.14 away
        (action("click", (600, 600)), "click", PLACE, 0, 1),  # 0.141 away
        (action("click", "x"), "click", BUTTON, 0, 1),
        (action("long_press"), "click", BUTTON, 0, 0),
        (action("scroll", text="down"), "scroll", DOWN, 1, 1),
        (action("scroll", text="up"), "scroll", DOWN, 0, 1),
        (action("type", text="red shoes"), "type", {"gt_input_text": "red shoes size 9"}, 1, 1),
        (action("type", text="red"), "type", {"gt_input_text": "red shoes size 9"}, 0, 1),  # F1 0.4
        (action("wait"), "wait", DOWN, 1, 1),
        ("<answer>{'action': 'click', 'point': [500, 50]}</answer>", "click", BUTTON, 1, 1),
        ("<answer>click 500 50</answer>", "click", BUTTON, 0, 0),
        ("<answer>__import__('os').abort()</answer>", "click", BUTTON, 0, 0),  # GUI-R1 evaluates it
        (f"{action('click')[:-9]}, {action('click')[24:]}", "click", BUTTON, 0, 0),
    ],
)
def test_a_step_in_an_interface(completion: str, answer: str, columns: dict[str, Any], step: int, kind: int) -> None:
    assert score(gui_step, completion, answer, columns=columns) == {"step": step, "type": kind}


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        (action("click"), 1),
        (action("click", (1, 2, 3)), 0),
        (action("type"), 0),
        (action("type", text="red"), 1),
        (action("scroll", text="down"), 1),
        (action("scroll", text="away"), 0),
        (action("click", text=7), 0),
        (action("click").replace("<think>t</think>", ""), 0),
    ],
)
def test_the_format_of_an_action(completion: str, right: int) -> None:
    assert score(gui_format, completion) == right


def test_a_step_whose_reference_is_missing_is_a_broken_row() -> None:
    with pytest.raises(ValueError, match="gt_bbox"):
        score(gui_step, action("click"), "click")
    with pytest.raises(ValueError, match="gt_input_text"):
        score(gui_step, action("type", text="x"), "type")


# --- mathematics ----------------------------------------------------------------------------------


@needs_math_verify
@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("<think>a</think>\\boxed{0.5}", "\\frac{1}{2}", 1),
        ("<think>a</think>\\boxed{3+2x}", "2x+3", 1),
        ("<think>a</think>\\boxed{\\frac{\\sqrt{12}}{2}}", "\\sqrt { 3 }", 1),
        ("<think>a</think>\\boxed{12\\text{ cm}}", "12", 1),
        ("<think>a</think>\\boxed{50^\\circ}", "50", 1),
        ("<think>a</think>\\boxed{1,234}", "1234", 1),
        ("<think>a</think>\\boxed{B}", "A", 0),
        ("<think>a</think>\\boxed{3.14}", "\\pi", 0),
        ("<think>a</think>\\boxed{30 or 40}", "30", 0),
        ("<think>a</think>\\boxed{}", "3", 0),
        ("<think>a</think>\\boxed{\\frac{}", "3", 0),
        ("<think>a</think>3", "3", 0),
        ("<think>\\boxed{3}</think>\\boxed{4}", "3", 0),
        ("<think>\\boxed{3}</think>so 3", "3", 0),
        ("<think>a</think>\\boxed{3} or \\boxed{4}", "3", 0),
        ("<think>a</think>\\boxed{4}", ["3", "4"], 1),
    ],
)
def test_results_in_a_box(completion: str, answer: Any, right: int) -> None:
    from asyncrl_plugins.tasks.maths import boxed

    assert score(boxed, completion, answer) == right


def test_without_math_verify_a_run_says_so_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    file = ROOT / "asyncrl_plugins" / "tasks" / "maths.py"
    with pytest.raises(UserError, match=r"pip install 'asyncrl\[maths\]'.*boxed_match"):
        load_module(file, file.read_bytes(), "asyncrl_plugins.tasks")


@needs_math_verify
@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("<think>A</think><answer>B</answer>", "B", 1),
        ("<think>A</think><answer>B. 5 cm</answer>", "B", 1),
        ("<think>B</think><answer>A</answer>", "B", 0),
        ("<think>a</think><answer>Because it is round.</answer>", "B", 0),  # RLLaVA takes the first letter
        ("<think>a</think>The answer is B.", "B", 1),
        ("<think>B</think>", "B", 0),
        ("<think>a</think><answer>B</answer>", json.dumps({"answer": "B", "ID": 7, "key": "2steps_1"}), 1),
        ("<answer>0.5</answer>", "1/2", 1),
        ("<answer>cone</answer>", "Cone", 1),
        ("<answer>130</answer>", "50 or 130", 1),
        ("<answer>50 130</answer>", "50 or 130", 0),
        ("<answer>8, 7</answer>", "8, 6", 1 / 2),
        ("<answer>8 6</answer>", "8, 6", 1),
        ("<answer>8, 6, 5</answer>", "8, 6", 2 / 3),  # more values than asked for cost
        ("<answer>6, 6</answer>", "8, 6", 1 / 2),  # each value counts in its place
        ("<answer>(1) 5 (2) 7</answer>", "(1) 5 (2) 6", 1 / 2),
        ("<answer>Cone 5 3</answer>", "Cone 5 4", 2 / 3),
        ("<answer>3 5</answer>", "5 3", 0),  # in no place, although the product is the same
        ("<answer>(1) 6 (2) 5</answer>", "(1) 5 (2) 6", 0),
        ("<answer>3 + 2x</answer>", "2 x + 3", 1),
        ("<answer>1234</answer>", "1,234", 1),
        ("<answer>(1, 2)</answer>", "(1,2)", 1),
        ("<answer>5</answer>", "6", 0),
    ],
)
def test_we_math(completion: str, answer: str, right: float) -> None:
    from asyncrl_plugins.tasks.we_math import graded

    assert score(graded, completion, answer) == pytest.approx(right)


@needs_math_verify
def test_four_dimensions_are_of_what_asyncrl_eval_writes(tmp_path: Path) -> None:
    from asyncrl_plugins.tasks.we_math import four_dimensions, scored_rows

    lines = [
        {"answer": "B", "columns": {"ID": 1, "key": "2steps_1"}, "components": {"graded": 1.0, "format": 0.0}},
        {"answer": json.dumps({"answer": "5", "ID": 1, "key": "2steps_2"}), "columns": {}, "components": {"graded": 1}},
        {"answer": "A", "columns": {"ID": 1, "key": "2steps_multi"}, "components": {"graded": 0.5}},
        {"answer": "A", "columns": {"ID": 2, "key": "2steps_multi"}, "components": None},
    ]
    file = tmp_path / "scores.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    close(four_dimensions(scored_rows(file)), problems=1, incomplete=0, ig=1)


@needs_math_verify
def test_four_dimensions_of_we_math() -> None:
    """Five problems of two steps and one of three; the last of two steps misses a row."""
    from asyncrl_plugins.tasks.we_math import four_dimensions

    two = [(1, 1, 1), (1, 1, 0), (1, 0, 1), (0, 0, 1), (1, 0, 0)]
    rows = [
        (number, f"2steps_{part}", bool(right))
        for number, rights in enumerate(two)
        for part, right in zip(("1", "2", "multi"), rights, strict=True)
    ]
    rows += [(0, f"3steps_{part}", part != "2") for part in ("1", "2", "3", "multi")]
    rows += [(9, "2steps_1", True), (9, "2steps_multi", True)]
    found = four_dimensions(rows)
    close(found, problems=6, incomplete=1, ik=1 / 6, ig=1 / 6)
    close(found, cm_strict=1 / 6, cm_loose=3 / 6, rm_strict=3 / 4, rm_loose=1 / 4)
    close(found, score_strict=(6 - 0.5 - 3 - 1) / 6, score_loose=(6 - 0.5 - 1 - 1) / 6)
    assert four_dimensions([]) == {"problems": 0, "incomplete": 0}
