"""Findings of `asyncrl doctor` about rows, templates and rewards."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.data.dataset import open_train
from asyncrl.data.prompts import PromptRenderer
from asyncrl.data.survey.row_survey import RowSurvey
from asyncrl_plugins.doctor.data import find_overlap, find_prompts, find_rewards
from asyncrl_plugins.doctor.examine import run_check
from asyncrl_plugins.doctor.findings import Finding, Report

MakeConfig = Callable[..., RunConfig]


def write_rows(tmp_path: Path, rows: Sequence[Mapping[str, Any]], **data: Any) -> dict[str, Any]:
    """The `data` section for these rows."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"answer": "x", **row}) + "\n" for row in rows))
    return {"train_files": [str(file)], "val_files": [], "max_prompt_length": 40, **data}


def look_at(config: RunConfig, purpose: str = "training") -> tuple[dict[str, Finding], RowSurvey]:
    report = Report(as_json=True)
    findings = find_prompts(config, open_train(config.data), purpose, PromptRenderer(config.data))
    look = run_check(report, "prompts", findings)
    assert look is not None
    return {finding.what: finding for finding in report.findings}, look


def test_rows_that_would_be_refused_or_are_too_long_are_counted(make_config: MakeConfig, tmp_path: Path) -> None:
    rows = [{"prompt": "q"}, {"prompt": "word " * 100}]
    rows += [{"prompt": f"<image> {i}", "images": []} for i in range(4)]
    found, _ = look_at(make_config(data=write_rows(tmp_path, rows, on_bad_row="stop")))
    assert found["training rows"].value.startswith("6 with columns answer, prompt, images; all of them looked at in")
    refused, long = found["bad rows"], found["prompt lengths"]
    assert refused.verdict == "problem"
    assert refused.value.startswith("4 of 6 training rows cannot be used (such as rows.jsonl:2): ")
    assert "1 <image> placeholder(s) in the prompt, 0 image(s) in column 'images' or" in refused.value
    assert refused.fix == "Write one <image> per image, or none to put the images first"
    assert (long.verdict, "1 of 6 training rows are longer (such as rows.jsonl:1)" in long.value) == (
        "problem",
        True,
    )
    longest = re.search(r"to (\d+) tokens", long.value)
    assert longest
    assert long.fix.startswith(f"set data.max_prompt_length={longest[1]}, or data.on_bad_row=skip")
    found, _ = look_at(make_config(data=write_rows(tmp_path, rows)))
    assert (found["bad rows"].verdict, found["prompt lengths"].verdict) == ("warning", "note")


def test_a_template_that_forgets_the_question(make_config: MakeConfig, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("Answer the question.")
    rows = [{"prompt": f"question {i}"} for i in range(3)]
    found, _ = look_at(make_config(data=write_rows(tmp_path, rows, format_prompt=str(template))))
    assert found["template"].verdict == "problem"
    assert "data.format_prompt" in found["template"].fix


def test_held_out_rows_that_are_trained_on(make_config: MakeConfig, tmp_path: Path) -> None:
    _, train = look_at(make_config(data=write_rows(tmp_path, [{"prompt": "a"}, {"prompt": "b"}])))
    _, twin = look_at(make_config(data=write_rows(tmp_path, [{"prompt": "b"}, {"prompt": "c"}])), "held-out")
    (found,) = list(find_overlap(train, twin))
    assert found.value == "1 of 2 held-out prompts are trained on, too: rows.jsonl:0 is rows.jsonl:1"
    assert found.verdict == "warning"
    _, other = look_at(make_config(data=write_rows(tmp_path, [{"prompt": "c"}])), "held-out")
    assert [finding.verdict for finding in list(find_overlap(train, other))] == ["ok"]


@pytest.mark.parametrize(("function", "warned"), [("boxed_match", 1), ("contains", 1), ("number_match", 0)])
def test_a_worked_solution_is_no_answer_of_a_reward_that_looks_for_all_of_it(
    make_config: MakeConfig, tmp_path: Path, function: str, warned: int
) -> None:
    rows = [{"prompt": "3 + 4?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}]
    reward = {"functions": [{"function": function}], "workers": 1, "accuracy": ""}
    config = make_config(data=write_rows(tmp_path, rows), reward=reward)
    found = list(find_rewards(config, open_train(config.data), PromptRenderer(config.data)))
    assert sum("number_match" in each.fix and each.verdict == "warning" for each in found) == warned


def rewards_of(make_config: MakeConfig, tmp_path: Path, body: str, **reward: Any) -> list[Finding]:
    file = tmp_path / "my_reward.py"
    file.write_text(f"import time\ndef score(sample):\n    {body}\n")
    functions = [{"function": f"{file}:score"}]
    config = make_config(reward={"functions": functions, "workers": 1, **reward})
    return list(find_rewards(config, open_train(config.data), PromptRenderer(config.data)))


@pytest.mark.parametrize(
    ("body", "verdict", "value"),
    [
        (
            "return float(sample.completion == sample.answer)",
            "ok",
            "score: 1, 1, 1 for the answer; 0, 0, 0 for nothing; 0, 0, 0 for target",
        ),
        ("return 0.5", "warning", "the weighted sum does not tell the answer or target from nothing"),
        (
            "time.sleep(60)",
            "problem",
            "reward_timeout on the answer: reward component 'score' was not done after 0.5 s",
        ),
    ],
)
def test_what_a_reward_gives_for_the_answer_and_for_nothing(
    make_config: MakeConfig, tmp_path: Path, body: str, verdict: str, value: str
) -> None:
    found = rewards_of(make_config, tmp_path, body, timeout_s=0.5)[-1]
    assert found.verdict == verdict
    assert found.value.startswith(value)


@pytest.mark.parametrize(
    ("answers", "function", "value"),
    [
        ([5.0, 6.0], "exact_match", "exact_match: 1, 1 for the answer; 0, 0 for nothing"),
        (["5", "five"], "exact_match", "exact_match: 1, 1 for the answer; 0, 0 for nothing"),
        (["5", {"x": 1}], "exact_match", "reward_exception on the answer: "),
        (["5"], "boxed_match", "boxed_match: 0 for the answer; 1 for the answer in \\boxed{}; 0 for nothing"),
        (["5", "6", "x"], "NUMBERS", "the weighted sum does not tell the answer from nothing on rows.jsonl:2"),
    ],
)
def test_each_answer_is_tried_as_a_completion_says_it(
    make_config: MakeConfig, tmp_path: Path, answers: list[Any], function: str, value: str
) -> None:
    (tmp_path / "n.py").write_text("def NUMBERS(sample):\n    return float(sample.completion.isdigit())\n")
    function = f"{tmp_path / 'n.py'}:NUMBERS" if function == "NUMBERS" else function
    rows = [{"prompt": f"q{n}", "answer": answer} for n, answer in enumerate(answers)]
    config = make_config(
        data=write_rows(tmp_path, rows), reward={"functions": [{"function": function}], "workers": 1, "accuracy": ""}
    )
    found = list(find_rewards(config, open_train(config.data), PromptRenderer(config.data)))
    assert found[-1].value.startswith(value)


RIGHT = {
    "typed": "sample.completion == sample.answer",
    "text": "sample.completion == str(sample.answer)",
    "short": "len(sample.completion) < 1",
    "form": "sample.completion.startswith('<')",
    "never": "0",
}


def components_of(
    make_config: MakeConfig, tmp_path: Path, answers: Sequence[Any], names: Sequence[str], accuracy: str = ""
) -> dict[str, Finding]:
    """Findings about components of RIGHT by name."""
    file = tmp_path / "components.py"
    file.write_text("".join(f"def {name}(sample):\n    return float({body})\n" for name, body in RIGHT.items()))
    config = make_config(
        data=write_rows(tmp_path, [{"prompt": f"q{n}", "answer": answer} for n, answer in enumerate(answers)]),
        reward={"functions": [{"function": f"{file}:{n}"} for n in names], "workers": 1, "accuracy": accuracy},
    )
    found = find_rewards(config, open_train(config.data), PromptRenderer(config.data))
    return {finding.value.partition(":")[0]: finding for finding in found}


@pytest.mark.parametrize(
    ("answers", "told", "fix"),
    [
        ([5.0, 6.0], "the answers are float: 5.0, which a completion says as '5'", "number_match"),
        ([7], "the answers are int: 7, which a completion says as '7'", "number_match"),
        ([True, False], "the answers are bool: true, which a completion says as 'True'", "compare text with text"),
        ([["a", "b"]], 'the answers are list: ["a", "b"], which a completion says as \'a\'', "compare text with text"),
        ([5.5, 6], "the answers are float and int: 5.5, which a completion says as '5.5'", "number_match"),
    ],
)
def test_an_accuracy_that_cannot_tell_the_answer_from_nothing(
    make_config: MakeConfig, tmp_path: Path, answers: list[Any], told: str, fix: str
) -> None:
    found = components_of(make_config, tmp_path, answers, ["typed", "short"])
    assert found["typed"].verdict == "warning"
    assert "cannot tell the answer from nothing" in found["typed"].value
    assert found["typed"].value.endswith(told)
    assert fix in found["typed"].fix
    assert found["short"].verdict == "ok"


@pytest.mark.parametrize(
    ("names", "accuracy", "verdicts"),
    [
        (["text", "form"], "", ["ok", "note"]),
        (["form", "text"], "text", ["note", "ok"]),
        (["form", "text"], "", ["warning", "ok"]),
        (["form", "never"], "never", ["warning", "warning"]),
    ],
)
def test_a_component_of_form_gives_no_false_alarm(
    make_config: MakeConfig, tmp_path: Path, names: list[str], accuracy: str, verdicts: list[str]
) -> None:
    found = components_of(make_config, tmp_path, ["5", 6], names, accuracy)
    assert [found[name].verdict for name in names] == verdicts
    if verdicts == ["warning", "ok"]:
        assert "reward.accuracy=text" in found["form"].fix


@pytest.mark.parametrize(
    "bad", [{"prompt": "q", "answer": None}, {"prompt": "word " * 100}, {"prompt": "<image> q", "images": ["none.png"]}]
)
def test_bad_rows_are_not_scored(make_config: MakeConfig, tmp_path: Path, bad: dict[str, Any]) -> None:
    data = write_rows(tmp_path, [bad, {"prompt": "a"}, {"prompt": "b"}], on_bad_row="skip")
    config = make_config(data=data, reward={"functions": [{"function": "exact_match"}], "workers": 1})
    _, survey = look_at(config)
    (found,) = find_rewards(config, open_train(config.data), PromptRenderer(config.data), survey)
    assert (found.verdict, found.value) == ("ok", "exact_match: 1, 1 for the answer; 0, 0 for nothing")


def test_an_environment_alone_may_reward(make_config: MakeConfig) -> None:
    room: dict[str, Any] = {"data": {"max_response_length": 600}, "batch": {"tokens_per_microbatch": 1024}}
    config = make_config(**room, environment={"name": "tests/rigs/lamp.py:Lamp"}, reward={"functions": []})
    nothing: Any = None
    (finding,) = find_rewards(config, nothing, nothing)  # asks no row where there is no function
    assert finding.value == f"{config.environment.name} alone rewards: its turns (reward.functions is empty)"
