"""Every kind of data file becomes the same rows, prompts and images."""

from __future__ import annotations

import base64
import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from asyncrl.config.sections import DataConfig
from asyncrl.data.dataset import RowSource, open_train, open_validation
from asyncrl.data.images import content_hash, decode_image
from asyncrl.data.prompts import PromptRenderer, RenderedPrompt
from asyncrl.errors import UserError
from asyncrl.rewards.sample import RewardSample, sample_of
from asyncrl.rewards.score import request_of, samples_of
from asyncrl.rewards.spec import call_reward
from asyncrl.workers.channel import pack, unpacker
from protocol.codec import Limits, decode
from protocol.messages import ControlFromLearner, Tickets
from protocol.values import pack_values, unpack_values
from tests.rigs.fuzz import content
from tests.rigs.fuzz.mutations import frames_of
from tests.rigs.tiny import ROOT

COLOURS = ("red", "green", "blue", "white", "black")


def png(colour: str, size: tuple[int, int] = (6, 4)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, format="PNG")
    return buffer.getvalue()


PNGS = {colour: png(colour) for colour in COLOURS}
ROWS: list[dict[str, Any]] = [
    {"prompt": "no image", "answer": "a", "images": [], "level": 1},
    {"prompt": "<image>one", "answer": "b", "images": ["red"], "level": 2},
    {"prompt": "<image>two <image>more", "answer": "c", "images": ["green", "blue"], "level": 3},
    {"prompt": "three, not placed", "answer": "d", "images": ["white", "red", "black"], "level": 4},
    {"prompt": "none at all", "answer": "e", "images": None, "level": 5},
]


def config_for(source: Path | str, **changes: Any) -> DataConfig:
    return DataConfig(train_files=(str(source),), **changes)


def render_all(rows: RowSource, config: DataConfig) -> list[RenderedPrompt]:
    renderer = PromptRenderer(config)
    return [renderer.render(rows[i], rows.row_id(i)) for i in range(len(rows))]


def paths(names: Sequence[str] | None) -> list[str] | None:
    return None if names is None else [f"pictures/{name}.png" for name in names]


def structs(names: Sequence[str] | None) -> list[dict[str, Any]] | None:
    return None if names is None else [{"bytes": PNGS[name], "path": f"{name}.png"} for name in names]


def with_images(convert: Callable[[Sequence[str] | None], Any]) -> list[dict[str, Any]]:
    return [{**row, "images": convert(row["images"])} for row in ROWS]


def write_pictures(folder: Path) -> None:
    (folder / "pictures").mkdir()
    for name, data in PNGS.items():
        (folder / "pictures" / f"{name}.png").write_bytes(data)


def jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet_with_bytes(folder: Path) -> str:
    pq.write_table(pa.Table.from_pylist(with_images(structs)), folder / "d.parquet", row_group_size=2)
    return str(folder / "d.parquet")


def json_lines(folder: Path) -> str:
    write_pictures(folder)
    return str(jsonl(folder / "d.jsonl", with_images(paths)))


def json_array(folder: Path) -> str:
    write_pictures(folder)
    (folder / "d.json").write_text(json.dumps(with_images(paths), indent=1))
    return str(folder / "d.json")


def as_dataset() -> datasets.Dataset:
    table = datasets.Dataset.from_list(with_images(structs))
    return table.cast_column("images", datasets.Sequence(datasets.Image()))


def saved_dataset(folder: Path) -> str:
    as_dataset().save_to_disk(folder / "saved")
    return str(folder / "saved")


def saved_split(folder: Path) -> str:
    datasets.DatasetDict({"train": as_dataset(), "test": as_dataset().select([0])}).save_to_disk(folder / "saved")
    return f"{folder / 'saved'}@train"


@pytest.mark.parametrize("make", [parquet_with_bytes, json_lines, json_array, saved_dataset, saved_split])
def test_every_kind_gives_the_same_prompts(make: Callable[[Path], str], tmp_path: Path) -> None:
    config = config_for(make(tmp_path))
    rows = open_train(config)
    assert len(rows) == len(ROWS)
    for expected, rendered in zip(ROWS, render_all(rows, config), strict=True):
        images = expected["images"] or []
        prompt = rendered.prompt
        assert prompt.image_hashes == tuple(content_hash(PNGS[name]) for name in images)
        assert dict(rendered.blobs) == {content_hash(PNGS[name]): PNGS[name] for name in images}
        assert prompt.answer == expected["answer"]
        assert prompt.columns == {"level": expected["level"]}
        assert [part.type for part in prompt.messages[0].content].count("image") == len(images)
        assert prompt.row_id.endswith(f":{expected['level'] - 1}")


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_images_stand_in_the_cells_of_a_csv_file(tmp_path: Path, ending: str) -> None:
    (tmp_path / "red.png").write_bytes(PNGS["red"])
    noise = io.BytesIO()  # larger than a cell that Python's csv module reads by default
    Image.effect_noise((400, 400), 100).save(noise, format="PNG")
    encoded = {name: base64.b64encode(data).decode() for name, data in {**PNGS, "noise": noise.getvalue()}.items()}
    assert len(encoded["noise"]) > 131_072
    cells = ["red.png", f"data:image/png;base64,{encoded['green']}", encoded["blue"], encoded["noise"], ""]
    path = tmp_path / f"rows{ending}"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="," if ending == ".csv" else "\t")
        writer.writerows([("prompt", "images", "answer"), *(('what, "exactly"?', cell, "7") for cell in cells)])
    config = config_for(path)
    rendered = render_all(open_train(config), config)
    images = [PNGS["red"], PNGS["green"], PNGS["blue"], noise.getvalue()]
    assert [list(one.blobs.values()) for one in rendered] == [*([image] for image in images), []]
    assert {one.prompt.answer for one in rendered} == {"7"}
    with path.open("a") as file:
        file.write("one cell\n")
    with pytest.raises(
        UserError, match=rf"rows{ending} line 7 does not have one cell for each of: prompt, images, answer"
    ):
        open_train(config)


def test_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"cannot load org/name .* HF_HUB_OFFLINE forbids downloads: set it to 0 "):
        open_train(config_for("org/name@train"))  # the real library, which is offline in tests

    def load_dataset(name: str, *, split: str) -> datasets.Dataset:
        assert (name, split) == ("org/name", "train[:5]")
        return as_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = config_for("org/name@train[:5]")
    rendered = render_all(open_train(config), config)
    assert [len(one.blobs) for one in rendered] == [0, 1, 2, 3, 0]
    assert rendered[2].prompt.row_id == "org/name@train[:5]:2"


@pytest.mark.parametrize("metadata", ["metadata.jsonl", "metadata.csv"])
def test_a_folder_of_images_takes_the_folder_name_as_answer(tmp_path: Path, metadata: str) -> None:
    for label, colour in (("cat", "red"), ("cat", "green"), ("dog", "blue")):
        (tmp_path / label).mkdir(exist_ok=True)
        (tmp_path / label / f"{colour}.png").write_bytes(PNGS[colour])
    jsonl(tmp_path / metadata, [{"file_name": "dog/blue.png", "prompt": "own question, in commas", "answer": "hound"}])
    if metadata.endswith(".csv"):
        (tmp_path / metadata).write_text('file_name,prompt,answer\ndog/blue.png,"own question, in commas",hound\n')
    (tmp_path / "q.jinja").write_text("{% if content is defined %}{{ content }}{% else %}What is it?{% endif %}")
    config = config_for(tmp_path, format_prompt=str(tmp_path / "q.jinja"))
    rendered = render_all(open_train(config), config)
    assert [one.prompt.answer for one in rendered] == ["cat", "cat", "hound"]
    assert [_text(one) for one in rendered] == ["What is it?", "What is it?", "own question, in commas"]
    assert [next(iter(one.blobs.values())) for one in rendered] == [PNGS["green"], PNGS["red"], PNGS["blue"]]


def _text(rendered: RenderedPrompt) -> str:
    return "".join(part.text for part in rendered.prompt.messages[-1].content if part.type == "text")


def test_files_are_concatenated_and_limited(tmp_path: Path) -> None:
    for name, start in (("b.jsonl", 10), ("a.jsonl", 0)):
        jsonl(tmp_path / name, [{"prompt": f"q{start + i}", "answer": start + i} for i in range(3)])
    pattern = config_for(tmp_path / "*.jsonl")
    assert [row["answer"] for row in open_train(pattern)] == [0, 1, 2, 10, 11, 12]
    names = (str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl"))
    listed = DataConfig(train_files=names, max_train_rows=4)
    rows = open_train(listed)
    assert [rows.row_id(i) for i in range(len(rows))] == ["b.jsonl:0", "b.jsonl:1", "b.jsonl:2", "a.jsonl:0"]
    with pytest.raises(IndexError):
        rows[4]
    assert open_validation(listed) is None


def test_image_dir_is_the_base_of_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pictures(tmp_path)
    elsewhere = tmp_path / "lists"
    elsewhere.mkdir()
    path = jsonl(elsewhere / "d.jsonl", [{"prompt": "q", "answer": 1, "images": "red.png"}])
    monkeypatch.chdir(tmp_path)  # relative image_dir: the base must count once, not twice
    config = config_for(path, image_dir="pictures")
    (rendered,) = render_all(open_train(config), config)
    assert list(rendered.blobs.values()) == [PNGS["red"]]


def test_every_column_reaches_the_reward_as_the_file_has_it(tmp_path: Path) -> None:
    """Over the wire to the server, and from there to a worker; the same image twice is one blob."""
    zone = timezone(timedelta(hours=2))
    columns: dict[str, tuple[pa.DataType | None, Any]] = {
        "note": (None, "n"),
        "mask": (None, b"\x89PNG"),
        "extra": (None, {"bytes": b"x", "path": None}),
        "when": (pa.timestamp("us"), datetime(2024, 5, 6, 7, 8, 9, 10)),
        "there": (pa.timestamp("ms", "+02:00"), datetime(2024, 5, 6, 7, 8, 9, tzinfo=zone)),
        "day": (pa.date32(), date(2024, 2, 29)),
        "noon": (pa.time64("us"), time(12, 0, 0, 1)),
        "dur": (pa.duration("us"), timedelta(days=-2, microseconds=3)),
        "price": (pa.decimal128(12, 4), Decimal("1.2300")),
        "half": (pa.float16(), 0.5),
        "kv": (pa.map_(pa.string(), pa.int64()), {"a": 1, "b": 2}),
        "by_day": (pa.map_(pa.date32(), pa.list_(pa.decimal128(5, 1))), {date(2024, 1, 2): [Decimal("0.5")]}),
        "seen": (pa.list_(pa.struct([("at", pa.date32()), ("raw", pa.binary())])), [{"at": date(1, 1, 1), "raw": b""}]),
    }
    fixed: dict[str, Any] = {"prompt": "<image>=<image>?", "answer": {"x": [1, 2.5]}, "images": structs(["red", "red"])}
    arrays = {name: pa.array([value]) for name, value in fixed.items()}
    for name, (kind, value) in columns.items():
        arrays[name] = pa.array([list(value.items()) if name in ("kv", "by_day") else value], kind)
    pq.write_table(pa.table(arrays), tmp_path / "d.parquet")
    config = config_for(tmp_path / "d.parquet")
    (rendered,) = render_all(open_train(config), config)
    assert (len(rendered.prompt.image_hashes), len(rendered.blobs)) == (2, 1)
    tickets = content.example_tickets(columns=rendered.prompt.columns, answer=rendered.prompt.answer)
    arrived = decode(frames_of(tickets), ControlFromLearner, Limits())
    assert isinstance(arrived, Tickets)
    sample = RewardSample("text", columns=arrived.tickets[0].prompt.columns, answer=arrived.tickets[0].prompt.answer)
    stream = unpacker()
    stream.feed(pack(request_of([sample], [], [])))
    (seen,) = samples_of(next(stream))
    assert seen.answer == fixed["answer"]
    wanted = {name: value for name, (_, value) in columns.items()}
    assert seen.columns == wanted
    assert {name: type(value) for name, value in seen.columns.items()} == {n: type(v) for n, v in wanted.items()}


@pytest.mark.parametrize("value", [{1, 2}, pd.Timestamp("2024-01-01 00:00:00.000000001"), [object()]])
@pytest.mark.parametrize("column", ["answer", "other"])
def test_a_column_that_the_reward_cannot_get_is_named(column: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"row d:3: column '{column}'.* cannot be brought to the reward: it has a \w+"):
        PromptRenderer(DataConfig(train_files=("x",))).render({"prompt": "q", "answer": "4", column: value}, "d:3")


def test_integers_of_any_length_reach_the_reward() -> None:
    row = {"prompt": "q", "answer": 2**80, "least": -(2**63) - 1, "list": [{"n": 10**30}]}
    prompt = PromptRenderer(DataConfig(train_files=("x",))).render(row, "d:0").prompt
    assert unpack_values(pack_values([prompt.answer, prompt.columns])) == [
        2**80,
        {"least": -(2**63) - 1, "list": [{"n": 10**30}]},
    ]


def test_chat_messages_and_system_prompt() -> None:
    renderer = PromptRenderer(DataConfig(train_files=("x",), system_prompt="Be brief."))
    conversation = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "A <image>?"},
        {"role": "user", "content": "Yes."},
    ]
    images = [PNGS["red"], {"bytes": PNGS["blue"]}]
    prompt = renderer.render({"prompt": conversation, "images": images}, "d:0").prompt
    assert [message.role for message in prompt.messages] == ["system", "user", "assistant", "user"]
    assert [[part.type for part in m.content] for m in prompt.messages] == [
        ["text"], ["image", "text"], ["text", "image", "text"], ["text"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": None}, "is empty"),
        ({"prompt": [{"role": "usr", "content": "x"}]}, "role 'usr'; use system, user"),
        ({"prompt": [{"role": "user", "content": [{"type": "audio"}]}]}, "has the part"),
        ({"prompt": "q", "answer": [1, {2}]}, r"column 'answer' \(data.answer_key\) cannot be brought to the reward"),
        ({"prompt": "q", "images": [PNGS["red"], "red.pgn"]}, "image 1: there is no image .*did you mean .*red.png"),
        ({"prompt": "q", "images": [b"not a png"]}, "image 0: these 9 bytes are no image .* leave the row out"),
        ({"prompt": "q", "images": "data:image/png,x"}, "image 0: 'data:image/png,x'... cannot be decoded: it is not"),
        ({"prompt": "q", "images": "https://example.com/a.png"}, "image 0: .* is an address, not a file. Download"),
        ({"prompt": "q", "images": 7}, "image 0: int '7' is no image"),
        ({"prompt": "lone \ud83d"}, r"column 'prompt' has '\\ud83d', half of a character"),
        ({"prompt": [{"role": "user", "content": [{"text": "\ude00"}]}]}, r"column 'prompt' has '\\ude00'"),
        ({"prompt": "q", "answer": ["x", "x\ud83d"]}, "column 'answer' has"),
        ({"prompt": "q", "note": {"of": {"\udc00": 1}}}, "column 'note' has"),
        ({"prompt": "<image><image>", "images": [PNGS["red"]]}, r"2 <image> placeholder\(s\) in the prompt, 1 image"),
        ({"prompt": "<image>", "images": [PNGS["red"]] * 2}, r"1 <image> placeholder\(s\) in the prompt, 2 image"),
    ],
)
def test_a_row_of_the_wrong_shape_is_named(tmp_path: Path, row: dict[str, Any], expected: str) -> None:
    (tmp_path / "red.png").write_bytes(PNGS["red"])
    with pytest.raises(UserError, match="row d:3[:,] .*" + expected):
        PromptRenderer(config_for("x", image_dir=str(tmp_path))).render(row, "d:3")


def test_decoding_is_upright_rgb_on_white() -> None:
    def encoded(image: Image.Image, **options: Any) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, format="PNG", **options)
        return buffer.getvalue()

    transparent = decode_image(encoded(Image.new("RGBA", (2, 2), (255, 0, 0, 0))), "x")
    assert (transparent.mode, transparent.getpixel((0, 0))) == ("RGB", (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert decode_image(encoded(Image.new("RGB", (5, 3)), exif=exif), "x").size == (3, 5)
    grey = decode_image(encoded(Image.new("I;16", (2, 2), 0x8000)), "x")
    assert grey.getpixel((0, 0)) == (128, 128, 128)
    whole = png("red", (300, 300))
    with pytest.raises(UserError, match=r"row d:0: the image is damaged .* Replace the file"):
        decode_image(whole[: len(whole) // 2], "row d:0")


BAD_TEMPLATES = [
    ("{{ contant }}", "row d:0: .*asks for a column that is not there: 'contant' is undefined. Columns: level, prompt"),
    ("{{ 1 // 0 }}", "row d:0: .*fails: ZeroDivisionError"),
    ("{{ content", "line 1: unexpected end of template"),
]


def test_a_template_sees_content_and_columns_and_a_bad_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    config = DataConfig(train_files=("x",), format_prompt=str(file))
    file.write_text("{{ content | trim }} (level {{ level }})\n")
    assert _text(PromptRenderer(config).render({"prompt": " q ", "level": 3}, "d:0")) == "q (level 3)"
    for template, expected in BAD_TEMPLATES:
        file.write_text(template)
        with pytest.raises(UserError, match=expected):
            PromptRenderer(config).render({"prompt": "q", "level": 3}, "d:0")
    inline = DataConfig(train_files=("x",), format_prompt="{{ content | trim }} (level {{ level }})\n")
    assert _text(PromptRenderer(inline).render({"prompt": " q ", "level": 3}, "d:0")) == "q (level 3)"
    with pytest.raises(UserError, match=r"row d:0: the template data.format_prompt asks for a column"):
        PromptRenderer(inline).render({"prompt": "q"}, "d:0")
    with pytest.raises(UserError, match=r"data.format_prompt: line 1: unexpected end of template"):
        PromptRenderer(DataConfig(train_files=("x",), format_prompt="{{ content"))
    with pytest.raises(UserError, match=r"data.format_prompt is 'nope.jinja', but there is no such file"):
        PromptRenderer(DataConfig(train_files=("x",), format_prompt="nope.jinja"))


def test_a_row_without_a_question_is_told_from_a_template_with_a_wrong_name(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ content }} Be brief.")
    config = DataConfig(train_files=("x",), prompt_key="query", format_prompt=str(tmp_path / "t.jinja"))
    for row in ({"query": None}, {"level": 3}):
        with pytest.raises(UserError, match=r"row d:0: there is nothing in column 'query' \(data.prompt_key\)"):
            PromptRenderer(config).render(row, "d:0")


def test_an_answer_reaches_the_reward_by_the_name_of_its_column_too() -> None:
    """Functions that were written for TRL take it so: `def accuracy(completions, solution, **kwargs)`."""
    config = DataConfig(train_files=("x",), answer_key="solution")
    prompt = PromptRenderer(config).render({"prompt": "q", "solution": "4", "level": 3}, "d:0").prompt
    assert prompt.answer == "4"
    assert prompt.columns == {"solution": "4", "level": 3}
    sample = sample_of(prompt, "4", {}, "stop", num_tokens=2, max_tokens=8)
    assert call_reward(lambda completions, solution: [float(completions == solution)], [sample], {}) == [1.0]
    prompt = PromptRenderer(DataConfig(train_files=("x",))).render({"prompt": "q", "answer": "4"}, "d:0").prompt
    assert prompt.columns == {}, "not twice under one name"


def test_an_answer_that_is_not_a_number_is_none(tmp_path: Path) -> None:
    """So rows without one are told from others: pandas has NaN for them, in a column of numbers."""
    (tmp_path / "d.jsonl").write_text('{"prompt": "q", "answer": NaN}\n{"prompt": "q", "answer": 5.0}\n')
    pq.write_table(pa.table({"prompt": ["q", "q"], "answer": [float("nan"), 5.0]}), tmp_path / "d.parquet")
    (tmp_path / "d.csv").write_text("prompt,answer\nq,\nq,5.0\n")
    for name, five in (("d.jsonl", 5.0), ("d.parquet", 5.0), ("d.csv", "5.0")):
        config = config_for(tmp_path / name)
        assert [one.prompt.answer for one in render_all(open_train(config), config)] == [None, five]


def test_a_misnamed_image_column_is_not_taken_for_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = jsonl(tmp_path / "d.jsonl", [{"prompt": "q", "answer": 1, "image": "x.png"}])
    with pytest.raises(UserError, match=r"no row has a column 'pictures' \(data.image_key\)"):
        open_train(config_for(path, image_key="pictures"))
    open_train(config_for(path))
    assert "set data.image_key" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("d.jsonl", '{"prompt": "q", "anwser": 1}', r"no column 'answer' .*Did you mean data.answer_key=anwser"),
        ("d.jsonl", '{"question": "q", "answer": 1}', r"no column 'prompt' .* Set data.prompt_key to one of"),
        ("d.jsonl", "", "there are no rows in it"),
        ("d.jsonl", '{"a": 1}\n{"a": \n', r"d.jsonl line 2 is not valid JSON"),
        (
            "d.jsonl",
            '{"a": 1}\n{"a": ' + "[" * 100_000,
            r"d.jsonl line 2 is not valid JSON: it is nested more than 64 deep",
        ),
        ("d.json", f'[{{"a": {"[" * 100}{"]" * 100}}}]', r"d.json is not valid JSON: it is nested more than 64 deep"),
        ("d.json", "[1]", r"d.json has a int: expected one JSON object per line"),
        ("d.parquet", "PAR1 no", r"cannot read .*d.parquet as Parquet"),
        ("d.txt", "x", r"data files are .parquet, .jsonl, .json, .csv or .tsv, not .txt"),
        ("e.jsonl", "", r"there is no data file .*did you mean .*e.jsonl"),
        ("d.jsonl", '{"prompt": 1, "answer": 2, "prompt": 3}', r"line 1 is not .*: the key 'prompt' is given twice"),
        ("d.json", '[{"prompt": {"a": 1, "a": 2}, "answer": 2}]', r"the key 'a' is given twice"),
        ("d.csv", "prompt,answer,answer\nq,1,2\n", r"d.csv has two columns 'answer', of which one would be lost"),
        ("d.tsv", "prompt\tprompt\tanswer\nq\t1\t2\n", r"d.tsv has two columns 'prompt'"),
        (
            "d.csv",
            "prompt;answer\nq;1\n",
            r"by ';'. Convert it: python -c '.*delimiter=\";\"\)\)' < .*d.csv > .*d.comm",
        ),
        ("d.csv", "prompt\tanswer\nq\t1\n", r"separated by '\\t'. Convert it: python -c '.*delimiter=\"\\t\"\)\)'"),
        ("d.tsv", "prompt,answer\nq,1\n", r"separated by '\\t' in a .tsv file, .* separated by ','"),
        *[
            (f"d.{kind}", text.encode(encoding), rf"d.{kind} is written {said}, .*: iconv -f {name} -t UTF-8 .*d.utf8")
            for kind, text in (("jsonl", '{"prompt": "é", "answer": 1}'), ("csv", "prompt,answer\né,1\n"))
            for encoding, name, said in (
                ("utf-16", "UTF-16", "in UTF-16"),
                ("utf-16-be", "UTF-16", "in UTF-16"),
                ("latin-1", "LATIN1", "in another encoding"),
            )
        ],
    ],
)
def test_files_that_are_not_what_they_say(tmp_path: Path, name: str, content: str | bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError, match=expected):
        open_train(config_for(tmp_path / name.replace("e.jsonl", "f.jsonl")))


def test_a_table_with_two_columns_of_a_name_is_refused(tmp_path: Path) -> None:
    two = pa.Table.from_arrays([pa.array(["q"]), pa.array(["1"]), pa.array(["2"])], ["prompt", "answer", "answer"])
    pq.write_table(two, tmp_path / "d.parquet")
    with pytest.raises(UserError, match=r"d.parquet has two columns 'answer'"):
        open_train(config_for(tmp_path / "d.parquet"))


def test_a_template_is_utf8_in_any_locale(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_bytes("{{ content }} né 漢字".encode())
    said = "from asyncrl.data.prompts import template_text; print(ascii(template_text('t.jinja')))"
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    read = subprocess.run([sys.executable, "-c", said], cwd=tmp_path, env=plain, capture_output=True, check=True).stdout
    assert read.strip() == ascii("{{ content }} né 漢字").encode()
    (tmp_path / "t.jinja").write_bytes("é {{ content }}".encode("latin-1"))
    with pytest.raises(UserError, match=r"data.format_prompt: .*t.jinja is no UTF-8 text: .*Save it as UTF-8"):
        PromptRenderer(config_for("x", format_prompt=str(tmp_path / "t.jinja")))


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no images and was not saved"):
        open_train(config_for(tmp_path / "empty"))
    datasets.DatasetDict({"train": as_dataset()}).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match=r"write .*saved@SPLIT with one of \['train'\]"):
        open_train(config_for(tmp_path / "saved"))
