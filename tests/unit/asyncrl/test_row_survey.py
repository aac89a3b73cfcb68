"""A survey looks at every row once: what it remembers is what it found, and counts only for the same data."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from asyncrl.checks.inputs import data_notes
from asyncrl.config.schema import RunConfig, changed
from asyncrl.data.dataset import RowSource, open_train
from asyncrl.data.survey import row_survey, survey_cache
from asyncrl.data.survey.row_survey import PromptRows, RowSurvey
from asyncrl.errors import BadStateError, UserError
from asyncrl.journal.writer import TicketSlot
from asyncrl.processing.bridge import start_of
from asyncrl.processing.processor import PromptProcessor
from learner.tickets.ticket_writer import ANSWERS, HELD_OUT, PROMPTS, USABLE, TicketWriter
from protocol.messages import Prompt

MakeConfig = Callable[..., RunConfig]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(survey_cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(survey_cache, "WORTHWHILE_S", 0.0)


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the rows that surveys look at."""
    seen: list[str] = []
    original = PromptRows._look_at

    def look_at(self: PromptRows, index: int) -> Any:
        seen.append(self.rows.row_id(index))
        return original(self, index)

    monkeypatch.setattr(PromptRows, "_look_at", look_at)
    return seen


def configured(make_config: MakeConfig, folder: Path, rows: int = 6, **data: Any) -> RunConfig:
    """Rows with one image each; the one of row 2 is missing."""
    Image.new("RGB", (30, 30)).save(folder / "there.png")
    (folder / "broken.png").write_bytes((folder / "there.png").read_bytes()[:-30])
    lines = [
        {"prompt": f"q {i}", "answer": "x", "images": ["gone.png" if i == 2 else "there.png"]} for i in range(rows)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return make_config(data={"train_files": [str(folder / "rows.jsonl")], "val_files": [], **data})


def survey(config: RunConfig, sample: int = 0) -> RowSurvey:
    return rows_of(config).survey(sample)


def rows_of(config: RunConfig) -> PromptRows:
    processor = PromptProcessor(config.model)
    return PromptRows(open_train(config.data, config.purpose), config.data, processor, config.network.max_message_mib)


def test_rows_are_looked_at_once_and_bad_ones_again(
    make_config: MakeConfig, tmp_path: Path, looked_at: list[str]
) -> None:
    config = configured(make_config, tmp_path)
    first = survey(config)
    assert (len(looked_at), first.usable, [bad.row_id for bad in first.bad]) == (6, [0, 1, 3, 4, 5], ["rows.jsonl:2"])
    looked_at.clear()
    shorter = config.data.model_copy(update={"max_prompt_length": 10})
    again = survey(config.model_copy(update={"data": shorter}))
    assert again.facts == first.facts
    assert looked_at == ["rows.jsonl:2"], "an image may have been put there; the limit needs no second look"
    assert len(again.overlong) == 5
    Image.new("RGB", (30, 30)).save(tmp_path / "gone.png")
    assert survey(config).usable == [*range(6)]


def test_an_overlong_row_is_told_what_makes_it_long(make_config: MakeConfig, tmp_path: Path) -> None:
    config = configured(make_config, tmp_path, max_prompt_length=30)
    Image.new("RGB", (280, 280)).save(tmp_path / "large.png")
    lines = [
        {"prompt": "word " * 60, "answer": "x", "images": ["there.png"]},
        {"prompt": "word " * 60, "answer": "x", "images": ["large.png"]},
        {"prompt": "word " * 60, "answer": "x"},
        {"prompt": "q", "answer": "x", "images": ["large.png"]},
        {"prompt": "q", "answer": "x", "images": ["there.png"]},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    *long, image = survey(config).overlong.values()
    assert all(reason.endswith("Raise the limit, or shorten the text") for reason in long)
    assert len(long) == 3
    assert image.endswith("Raise the limit, or lower model.max_pixels for smaller images")


def test_an_image_of_a_shape_that_is_not_taken_is_named(make_config: MakeConfig, tmp_path: Path) -> None:
    config = configured(make_config, tmp_path)
    Image.new("RGB", (300, 1)).save(tmp_path / "line.png")
    Image.new("F", (30, 30)).save(tmp_path / "depth.tiff")
    images = (["there.png", "line.png"], ["there.png", "depth.tiff"], ["there.png", "broken.png"], ["there.png"])
    lines = [{"prompt": "q", "answer": "x", "images": each} for each in images]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shape, mode, damage = (bad.reason for bad in survey(config).bad)
    assert shape.startswith("row rows.jsonl:0, image 1: the processor takes no such image, of 300 x 1 pixels: ")
    assert mode.startswith("row rows.jsonl:1, image 1: the image's grey values are floats")
    assert damage.startswith("row rows.jsonl:2, image 1: the image is damaged")


def test_several_rows_are_looked_at_at_once(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, both, examine = configured(make_config, tmp_path), threading.Barrier(2), PromptRows._look_at

    def examine_with_another(*row: Any) -> Any:
        both.wait(timeout=5)
        return examine(*row)

    monkeypatch.setattr(PromptRows, "_look_at", examine_with_another)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert survey(config).num_looked_at == 6


def test_changed_data_or_settings_are_looked_at_again(
    make_config: MakeConfig, tmp_path: Path, looked_at: list[str]
) -> None:
    config = configured(make_config, tmp_path)
    survey(config)
    changes: list[Callable[[], RunConfig]] = [
        lambda: config.model_copy(update={"data": config.data.model_copy(update={"system_prompt": "Be brief."})}),
        lambda: configured(make_config, tmp_path, rows=7),
    ]
    for change in changes:
        looked_at.clear()
        changed = change()
        assert survey(changed).num_looked_at == len(looked_at) > 1
    looked_at.clear()
    Image.new("RGB", (300, 300)).save(tmp_path / "there.png")
    assert survey(changed).usable == []
    assert len(looked_at) == 7, "an image that rows name has changed"


def test_a_sample_is_no_survey(make_config: MakeConfig, tmp_path: Path, looked_at: list[str]) -> None:
    config = configured(make_config, tmp_path, rows=50)
    assert survey(config, sample=10).num_looked_at == len(looked_at) == 10
    looked_at.clear()
    assert survey(config, sample=10).num_looked_at == 20
    assert len(looked_at) == 10, "what is remembered of a sample is no survey either"
    assert survey(config).num_looked_at == 50
    looked_at.clear()
    assert survey(config, sample=10).num_looked_at == 50
    assert looked_at == ["rows.jsonl:2"]


def test_rows_without_question_or_answer_and_what_no_message_holds_are_bad(
    make_config: MakeConfig, tmp_path: Path, looked_at: list[str]
) -> None:
    """A server would refuse a list of over 65,536 elements, which it must not do in the middle of a run."""
    good = {"prompt": "q", "answer": "x"}
    rows = [
        *(good, {"prompt": "q"}, {**good, "answer": None}, {"answer": "x"}),
        *({**good, "solution": "x" * 9 * 2**20}, {**good, "steps": [1] * 70_000}, {**good, "text": "\ud800"}, good),
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(data={"train_files": [str(file)], "val_files": []})
    found = survey(config)
    assert found.usable == [0, 7]
    unanswered = "there is no answer in column 'answer' (data.answer_key), and other rows have one"
    for bad, number, said in zip(
        found.bad,
        range(1, 7),
        (
            f": {unanswered}",
            f": {unanswered}",
            ": column 'prompt' (data.prompt_key) is empty",
            " is too large to be sent to a rollout server: 0 images, 0.0 MiB, and 9.0 MiB of text and columns",
            " cannot be sent to a rollout server: tickets.tickets.0.prompt.columns: Value error, no packed values: 7",
            ": column 'text' has '\\ud800', half of a character",
        ),
        strict=True,
    ):
        assert bad.reason.startswith(f"row rows.jsonl:{number}{said}")
    looked_at.clear()
    assert survey(config).bad == found.bad
    assert "rows.jsonl:1" not in looked_at, "what is wrong with it is remembered"


def test_answers_may_be_null_everywhere_and_a_missing_column_is_one_refusal(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """A reward may need none, but a column that no row has is a wrong name."""
    file = tmp_path / "rows.jsonl"
    config = make_config(data={"train_files": [str(file)], "val_files": []})
    file.write_text('{"prompt": "q", "answer": null}\n' * 3)
    assert survey(config).usable == [0, 1, 2]
    file.write_text('{"prompt": "q", "response": "x"}\n' * 3)
    with pytest.raises(UserError, match=r"^rows.jsonl has no column 'answer' \(data.answer_key\). .*prompt, response$"):
        survey(config)


@pytest.mark.parametrize(
    ("rows", "column"),
    [
        ('{"prompt": "q", "map": "S.G"}\n' * 2, "answer"),
        ('{"prompt": "q", "answer": "x"}\n{"prompt": "q", "answer": null}\n', "answer"),
        ('{"prompt": "q", "truth": 1}\n{"prompt": "q"}\n', "truth"),
    ],
)
def test_rows_of_an_environment_that_judges_alone_need_no_answer(
    make_config: MakeConfig, tmp_path: Path, rows: str, column: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(rows)
    environment = {"name": "some.py:Lamp", "limits": {"tokens_per_turn": 4}}
    data = {"train_files": [str(file)], "val_files": [str(file)], "answer_key": column}
    alone = make_config(data=data, environment=environment, reward={"functions": []})
    assert survey(alone).usable == [0, 1]
    processor = PromptProcessor(alone.model)
    writer = TicketWriter(alone.ticket_settings, processor, (processor.tokenizer.eos_token_id,))
    assert (writer.num_train_rows, writer.num_held_out_rows) == (2, 2)
    for judged in (make_config(data=data, environment=environment), make_config(data=data)):
        try:
            assert survey(judged).usable != [0, 1]
        except UserError as refused:
            assert "Where no reward needs one set data.answer_key= (nothing)" in str(refused)  # noqa: PT017
        assert survey(changed(judged, {"data.answer_key": ""})).usable == [0, 1]


def test_an_environment_sees_the_column_answer_whatever_answer_key_is() -> None:
    prompt = Prompt(row_id="r", messages=(), columns={"answer": 3, "map": "S.G"})
    assert start_of(prompt, [], 0).row == {"answer": 3, "map": "S.G"}
    assert start_of(prompt.model_copy(update={"answer": 4}), [], 0).row["answer"] == 4
    assert start_of(prompt.model_copy(update={"columns": {}}), [], 0).row == {"answer": None}


@pytest.mark.parametrize(
    "last", ["The answer is", [{"type": "text", "text": "The"}, {"type": "text", "text": " answer is"}]]
)
def test_a_prompt_that_ends_with_an_assistants_turn_is_a_counted_bad_row(
    make_config: MakeConfig, tmp_path: Path, last: Any
) -> None:
    """Left out with its reason and the fix, beside rows that are trained."""
    asked = {"role": "user", "content": "q"}
    prompts = [[asked], [asked, {"role": "assistant", "content": last}], [asked]]
    write_rows(tmp_path, [{"prompt": prompt, "answer": "x"} for prompt in prompts])
    config = make_config(data={"train_files": [f"{tmp_path}/rows.jsonl"], "val_files": []})
    writer = TicketWriter(config.ticket_settings, PromptProcessor(config.model), (1,))
    assert writer.num_train_rows == 2
    (bad,) = writer.bad_rows
    assert bad.row_id == "rows.jsonl:1"
    assert re.search(r"ends with the assistant's turn 'The answer is', .* Leave it out; .*data\.target_key", bad.reason)


def test_a_survey_that_is_broken_off_goes_on_where_it_was(
    make_config: MakeConfig, tmp_path: Path, looked_at: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large data set would else never begin where a machine gives it an hour at a time."""
    monkeypatch.setattr(row_survey, "ROWS_AT_ONCE", 4)
    monkeypatch.setattr(row_survey, "KEEP_EVERY_S", 0.0)
    config = configured(make_config, tmp_path, rows=12)
    read = RowSource.__getitem__

    def until_killed(self: RowSource, index: int) -> Any:
        if index == 9:
            raise KeyboardInterrupt
        return read(self, index)

    monkeypatch.setattr(RowSource, "__getitem__", until_killed)
    with pytest.raises(KeyboardInterrupt):
        survey(config)
    monkeypatch.setattr(RowSource, "__getitem__", read)
    looked_at.clear()
    assert survey(config).num_looked_at == 12
    assert sorted(looked_at) == sorted(f"rows.jsonl:{index}" for index in (2, 8, 9, 10, 11))


def test_nothing_usable_stops_with_the_reasons(make_config: MakeConfig, tmp_path: Path) -> None:
    config = configured(make_config, tmp_path, image_dir=str(tmp_path / "elsewhere"))
    with pytest.raises(
        UserError, match=r"^none of 6 training rows can be used:\n- row rows.jsonl:0, image 0: there is no"
    ):
        rows_of(config).usable()


def test_a_disk_that_fails_is_no_bad_row(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row must not be left out in one attempt and be there in the next."""

    def fail(self: RowSource, index: int) -> dict[str, Any]:
        raise OSError(5, "Input/output error")

    config = configured(make_config, tmp_path)
    monkeypatch.setattr(RowSource, "__getitem__", fail)
    with pytest.raises(BadStateError, match=r"row rows.jsonl:0 cannot be read: .*Input/output error"):
        survey(config)


def test_a_run_with_other_bad_rows_is_another_run(make_config: MakeConfig, tmp_path: Path) -> None:
    """The order of the rows, by which a run resumes, is that of the usable ones: the journal's settings tell them."""
    config = configured(make_config, tmp_path)
    processor = PromptProcessor(config.model)
    before = TicketWriter(config.ticket_settings, processor, (1,))
    first = before.fingerprints()
    assert first == TicketWriter(config.ticket_settings, processor, (1,)).fingerprints()
    (tmp_path / "there.png").rename(tmp_path / "gone.png")
    lines = (tmp_path / "rows.jsonl").read_text().replace("there.png", "other.png").splitlines()
    lines[5] = lines[5].replace("other.png", "broken.png")  # row 5 is bad in place of row 2
    (tmp_path / "gone.png").rename(tmp_path / "other.png")
    lines[2] = lines[2].replace("gone.png", "other.png")
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    after = TicketWriter(config.ticket_settings, processor, (1,))
    assert [bad.row_id for bad in (*before.bad_rows, *after.bad_rows)] == ["rows.jsonl:2", "rows.jsonl:5"]
    assert before.num_train_rows == after.num_train_rows
    assert first[USABLE] != after.fingerprints()[USABLE]


def rows_and_images(folder: Path, name: str = "rows.jsonl") -> list[dict[str, Any]]:
    """Rows of two images, written as `write_rows` does."""
    for number, colour in enumerate(("red", "blue")):
        Image.new("RGB", (30, 30), colour).save(folder / f"{number}.png")
    rows = [{"prompt": f"q {i}", "answer": str(i), "level": i, "images": [f"{i % 2}.png"]} for i in range(100)]
    write_rows(folder, rows, name)
    return rows


def write_rows(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_every_row_and_image_counts_in_the_fingerprints(make_config: MakeConfig, tmp_path: Path) -> None:
    rows = rows_and_images(tmp_path)
    write_rows(tmp_path, rows[:3], "held.jsonl")
    config = make_config(data={"train_files": [f"{tmp_path}/rows.jsonl"], "val_files": [f"{tmp_path}/held.jsonl"]})
    processor = PromptProcessor(config.model)

    def changed() -> set[str]:
        now = TicketWriter(config.ticket_settings, processor, (1,)).fingerprints()
        return {name for name in now if now[name] != first[name]}

    first = TicketWriter(config.ticket_settings, processor, (1,)).fingerprints()
    assert changed() == set()
    rows[41]["answer"] = "99"
    write_rows(tmp_path, rows)
    assert changed() == {ANSWERS}
    write_rows(tmp_path, [{**row, "answer": str(i), "level": 7} for i, row in enumerate(rows)])
    assert changed() == {ANSWERS}, "columns are the reward's, too"
    rows[41] |= {"answer": "41", "prompt": "another"}
    write_rows(tmp_path, rows)
    assert changed() == {PROMPTS}
    rows[41]["prompt"] = "q 41"
    write_rows(tmp_path, rows)
    Image.new("RGB", (30, 30), "green").save(tmp_path / "1.png")
    assert changed() == {PROMPTS, HELD_OUT}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "0.png").write_bytes((folder / "1.png").read_bytes()), "its prompt or an image"),
        (lambda folder: write_table(folder, answer="99"), "its answer or another column"),
        (lambda folder: write_table(folder, level=5), "its answer or another column"),
        (lambda folder: write_table(folder, prompt="another"), "its prompt or an image"),
    ],
    ids=["an image", "an answer", "a column", "a prompt"],
)
def test_a_row_that_changes_under_a_run_stops_it(
    make_config: MakeConfig, tmp_path: Path, change: Callable[[Path], Any], said: str
) -> None:
    """Trained and held-out rows; JSONL is read at the start, Parquet row by row."""
    rows_and_images(tmp_path)
    write_table(tmp_path)
    config = make_config(data={"train_files": [f"{tmp_path}/rows.parquet"], "val_files": [f"{tmp_path}/rows.parquet"]})
    writer = TicketWriter(config.ticket_settings, PromptProcessor(config.model), (1,))
    writer.write(TicketSlot(0, 0, 0, 0))
    change(tmp_path)
    reason = f"{said} is not what it was when the run began: the data must not change under it.*--accept-changes"
    for write in (lambda: writer.write(TicketSlot(0, 0, 0, 0)), lambda: writer.write_evaluation(0, 0)):
        writer.train.rows, writer.held_out.rows = (open_train(config.data) for _ in range(2))  # as mapped memory is
        with pytest.raises(UserError, match=rf"row rows.parquet:\d+: {reason}"):
            write()


def test_rows_that_have_changed_between_two_starts_are_named(make_config: MakeConfig, tmp_path: Path) -> None:
    def survey(answers: list[str]) -> RowSurvey:
        rows = [{"prompt": f"q {number}", "answer": answer} for number, answer in enumerate(answers)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
        config = make_config(data={"train_files": [f"{tmp_path}/rows.parquet"], "val_files": []})
        return PromptRows(open_train(config.data), config.data, PromptProcessor(config.model), 16).usable()

    before = survey(["1"] * 9).digests()
    assert survey(["1"] * 9).changed_since(before) == ""
    assert survey([*["1"] * 3, "2", *["1"] * 4, "3"]).changed_since(before) == "rows.parquet:3, rows.parquet:8"
    named = ", ".join(f"rows.parquet:{number}" for number in range(5))
    assert survey(["2"] * 9).changed_since(before) == f"{named} and 4 more"
    assert survey(["1"] * 8).changed_since(before) == "", "another number of rows: no row is the one before"


def write_table(folder: Path, **changes: Any) -> None:
    """Rows that all have one image."""
    row = {"prompt": "q", "answer": "4", "level": 3, "images": ["0.png"], **changes}
    pq.write_table(pa.Table.from_pylist([row] * 4), folder / "rows.parquet")


def test_held_out_rows_that_are_trained_on_are_told_before_the_run(make_config: MakeConfig, tmp_path: Path) -> None:
    """By file, which costs nothing, and by prompt, which the survey has measured."""
    rows = rows_and_images(tmp_path)
    write_rows(tmp_path, rows[:7], "some.jsonl")
    write_rows(tmp_path, [{**row, "prompt": "others"} for row in rows], "others.jsonl")

    def notes(train: str, val: str) -> tuple[list[str], int]:
        config = make_config(data={"train_files": [f"{tmp_path}/{train}"], "val_files": [f"{tmp_path}/{val}"]})
        writer = TicketWriter(config.ticket_settings, PromptProcessor(config.model), (1,))
        return [
            note.partition(" is in ")[0]
            for note in data_notes(config.data, config.reward, config.environment, config.purpose)
        ], writer.num_held_out_trained

    assert notes("rows.jsonl", "rows.jsonl") == (["rows.jsonl"], 100)
    assert notes("rows.jsonl", "../" + tmp_path.name + "/rows.jsonl") == (["rows.jsonl"], 100)
    assert notes("[rs]*.jsonl", "some.jsonl") == (["some.jsonl"], 7)
    assert notes("rows.jsonl", "some.jsonl") == ([], 7)
    assert notes("others.jsonl", "some.jsonl") == ([], 0)
