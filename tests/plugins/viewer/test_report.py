"""`asyncrl report`: what is on the page, whatever is in the run directory."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from asyncrl.cli import main
from asyncrl_plugins.viewer.report.embedded_images import LARGEST_SIDE, EmbeddedImages
from asyncrl_plugins.viewer.report.page import page_of
from asyncrl_plugins.viewer.report.reading import read_run
from asyncrl_plugins.viewer.report.sample_cards import choose
from asyncrl_plugins.viewer.report.settings import differences
from tests.rigs import made_up_run as made

VOID = {"meta", "img", "br", "hr", "input", "link"}


class Page(HTMLParser):
    """Fails on tags that do not match; keeps text, tags and images."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.words += data + "\n"


def page(run: Path) -> Page:
    return Page(page_of(read_run(run)))


def charts(shown: Page) -> dict[str, list[dict]]:
    """Series by the chart's title."""
    data = [json.loads(a["data-chart"] or "") for tag, a in shown.tags if tag == "figure"]
    labels = [a["aria-label"] or "" for tag, a in shown.tags if tag == "svg" and a.get("class") is None]
    return {label.partition(":")[0]: each["s"] for label, each in zip(labels, data, strict=True)}


def test_the_page_of_a_finished_run_says_what_matters(tmp_path: Path) -> None:
    shown = page(made.make_run(tmp_path / "run"))
    for said in ("finished", "0.400 → 0.600", "Healthy", "How many?", "KeyError: 'x'", "models/tiny", "2.13.0"):
        assert said in shown.words, said
    assert "2 times" in shown.words  # alike completions, once
    images = [attributes for tag, attributes in shown.tags if tag == "img"]
    assert images
    assert all((image["src"] or "").startswith("data:image/png;base64,") for image in images)


def test_nothing_on_the_page_comes_from_anywhere_else(tmp_path: Path) -> None:
    shown = page(made.make_run(tmp_path / "run"))
    for tag, attributes in shown.tags:
        for name in ("src", "href", "xlink:href", "action", "data"):
            assert (attributes.get(name) or "#").startswith(("data:image/", "#")), (tag, name)
        assert not [name for name in attributes if name.startswith("on")]
    policy = next(a["content"] or "" for tag, a in shown.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "'unsafe-inline'; script-src 'sha256-" in policy


def test_curves_hold_the_values_of_the_run(tmp_path: Path) -> None:
    drawn = charts(page(made.make_run(tmp_path / "run", change=lambda n: {"entropy": 7.0 if n == 9 else 0.4})))
    (entropy,) = drawn["Entropy"]
    assert [9.0, 7.0] in entropy["p"]
    assert len(entropy["p"]) == 40
    assert [series["n"] for series in drawn["Accuracy"]] == ["training", "held out"]
    assert drawn["Accuracy"][1]["p"] == [[0.0, 0.4], [20.0, 0.5], [40.0, 0.6]]
    assert [series["n"] for series in drawn["Seconds of a step"]] == ["waiting", "learning", "publishing"]
    shown = page(made.make_run(tmp_path / "gap", change=lambda n: {"loss": None if n == 20 else 0.01}))
    (loss,) = charts(shown)["Loss"]
    assert [20.0, None] in loss["p"], "a number that is none is a gap"
    assert "The loss was not a number" in shown.words


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'\x1b[31m\u202ereversed"


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    run = made.make_run(tmp_path / HOSTILE.replace("/", "|").replace("\x1b", "")[:60], status={"phase": HOSTILE})
    bad = made.completion(HOSTILE, 1.0, HOSTILE, HOSTILE)
    bad["rewards"] = {HOSTILE: 1.0}
    made.lines(run / "samples.jsonl", [made.sample(1, [HOSTILE, "../../etc/passwd"], bad, prompt=HOSTILE)])
    made.lines(run / "timeline.jsonl", [made.span(HOSTILE, HOSTILE, 0, 5), made.span(HOSTILE, "usage", 0, 5)])
    (run / "failure.json").write_text(
        json.dumps({"service": HOSTILE, "kind": HOSTILE, "reason": HOSTILE, "time": 0.0, "step": 3})
    )
    (run / "environment.json").write_text(json.dumps({"starts": [{"cpu": HOSTILE, "packages": {HOSTILE: HOSTILE}}]}))
    (run / "config.yaml").write_text(made.CONFIG + f"telemetry: {{host: {json.dumps(HOSTILE)}}}\n")
    record = made.step(1) | {f"reward/{HOSTILE}": 0.5, f"rows/{HOSTILE}": 1.0}
    made.lines(run / "metrics.jsonl", [record, made.step(2), made.step(3)])
    shown = page(run)
    assert [tag for tag, _ in shown.tags].count("script") == 1
    assert not [a for tag, a in shown.tags if tag == "img"]
    assert "\x1b" not in shown.words
    assert "\u202e" not in shown.words
    assert shown.words.count("<script>alert(1)</script>") >= 6


def test_images_come_from_their_folder_scaled_down_and_share_a_budget(tmp_path: Path) -> None:
    run = made.make_run(tmp_path / "run")
    (tmp_path / "deadbeef.png").write_bytes(next((run / "images").iterdir()).read_bytes())
    (run / "images" / "badbadbad.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    large, other = made.image(run, (2000, 1000), "red"), made.image(run, (2000, 1000), "blue")
    picture = EmbeddedImages(run).get(large)
    assert (picture.width, picture.height) == (2000, 1000)
    assert picture.uri.startswith("data:image/jpeg;base64,")
    assert len(picture.uri) < 20 * LARGEST_SIDE
    pictures = EmbeddedImages(run, budget_bytes=len(picture.uri))
    assert pictures.get(large).uri
    assert pictures.get(large).uri, "once read it costs no more"
    names = (other, "../deadbeef", "deadbeef", "badbadbad")
    problems = ("left out: image budget used up", "not an image's hash", "not in images/")
    assert [pictures.get(name).problem for name in names] == [*problems, "damaged, or no image"]


def test_a_trajectory_of_several_turns_is_a_chat_with_its_images(tmp_path: Path) -> None:
    run = made.make_run(tmp_path / "run")
    digest = made.image(run, colour="teal")
    crop = {"name": "crop", "arguments": '{"row": 1}', "error_kind": "", "error": "", "seconds": 0.1}
    wrong = crop | {"error_kind": "arguments", "error": HOSTILE}
    turns: list[dict] = [
        {"text": "look there", "reward": 0.5, "versions": [3, 4], "calls": [crop, wrong], "info": '{"hit": true}',
         "shown": [{"role": "tool", "parts": ["here it is", {"image": digest}, {"image": "../x"}]}]},
        {"text": "a seven", "reward": None, "versions": "?", "calls": [3], "shown": [{"role": 1}, "?"], "context": 41},
    ]  # fmt: skip
    one = made.completion("look there ... a seven", 1.0) | {"turns": turns, "end": "turns"}
    made.lines(run / "samples.jsonl", [made.sample(1, [], one) | {"opening": [{"role": "user", "parts": ["begin"]}]}])
    text = page_of(read_run(run))
    said = [
        "begin",
        "look there",
        "version 3, 4",
        "crop",
        "arguments: ",
        "here it is",
        "not an image",
        "a seven",
    ]
    assert text.index("here it is") < text.index("41 tokens of history") < text.index("turn 1")
    assert [word for word in said if word not in text] == []
    assert text.index("turn 0") < text.index("here it is") < text.index("data:image/png") < text.index("turn 1")
    assert "2 turns, ended by turns" in text
    assert HOSTILE not in text


def test_a_directory_without_a_run_and_a_file_that_cannot_be_written_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made.make_run(tmp_path / "run")
    for folder in (tmp_path, tmp_path / "nowhere"):
        for runs in ([folder], [run, folder]):
            assert main(["report", *map(str, runs)]) == 2
            assert capsys.readouterr().err.startswith(
                f"error: there is no run in {folder}: it has none of status.json,"
            )
    assert not list(tmp_path.rglob("report.html"))
    assert main(["report", str(run), "-o", str(tmp_path / "no" / "folder.html")]) == 2
    assert "Name another file with -o" in capsys.readouterr().err
    assert main(["report", str(run)]) == 0
    assert str(run / "report.html") in capsys.readouterr().out


def test_an_unfinished_run_has_a_page_of_what_there_is(tmp_path: Path) -> None:
    for only in ("status.json", "metrics.jsonl", "journal.sqlite", "failure.json"):
        (tmp_path / only).mkdir()
        (tmp_path / only / only).touch()
        shown = page(tmp_path / only)
        assert "There is nothing to judge yet" in shown.words
        assert "No step has recorded its time" in shown.words
    run = made.make_run(tmp_path / "run", steps=1, status={"phase": "training", "total_steps": 90}, accuracy=())
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rewa')  # the learner is writing
    shown = page(run)
    assert "1 of 90" in shown.words
    assert "could not be read" not in shown.words
    assert "The learner fell silent" in shown.words  # its status is years old


def test_broken_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    run = made.make_run(tmp_path / "run")
    for name in ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "timeline.jsonl"):
        with (run / name).open("ab") as file:
            file.write(b'not json\n[1]\n{"step": "x"}\n{"step": true}\n\xff\xfe\n' + b"[" * 100_000 + b"\n")
    shown = page(run)
    assert "metrics.jsonl has 6 lines that could not be read" in shown.words
    assert "6 lines could not be read" in shown.words  # of the samples


def test_values_of_any_type_do_no_harm(tmp_path: Path) -> None:
    odd = [None, "x", True, [], {}, 1e308, -1e308, 10**400]
    run = made.make_run(tmp_path / "run", steps=len(odd))
    keys = [key for key in made.step(1) if key != "step"]
    records = [made.step(i + 1) | dict.fromkeys(keys, value) for i, value in enumerate(odd)]
    made.lines(run / "metrics.jsonl", records)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss": NaN, "reward/mean": Infinity, "time": -Infinity}\n')
    made.lines(run / "evaluations.jsonl", [{"step": 1, "accuracy": value, "rows": value} for value in odd])
    made.lines(
        run / "samples.jsonl",
        [made.sample(1, [], completion) | {"images": value, "answer": value} for value in odd for completion in [{}]]
        + [{"step": 1, "completions": value} for value in odd]
        + [{"step": 1, "completions": [{"reward": v, "rewards": v, "status": v, "text": v, "error": v}]} for v in odd],
    )
    made.lines(run / "timeline.jsonl", [{"who": v, "what": "x", "since": v, "until": v} for v in odd])
    for name in ("status.json", "environment.json", "failure.json"):
        (run / name).write_text(json.dumps({"starts": odd, "errors": odd, "phase": 3, "time": "x", "step": "y"}))
    page(run)
    (run / "config.yaml").write_text("model: 3\ntrainer: [1, 2]\nbatch: {prompts_per_step: x}\n2: {a: 1}\n")
    assert "no such key in this version" in page(run).words
    for broken in ("a: [", "- 1", "\x00", "null"):
        (run / "config.yaml").write_text(broken)
        page(run)


def test_the_settings_that_differ_from_the_defaults_are_told_apart(tmp_path: Path) -> None:
    table = page(made.make_run(tmp_path / "run")).words.partition("The whole configuration")[0]
    assert "data.max_response_length\n64\n512" in table
    assert "trainer.mode" not in table  # async is the default


def test_several_runs_are_laid_over_each_other(tmp_path: Path) -> None:
    first, second = made.make_run(tmp_path / "a" / "grpo"), made.make_run(tmp_path / "b" / "grpo", steps=20)
    (second / "config.yaml").write_text(made.CONFIG.replace("max_staleness: 2", "max_staleness: 5"))
    output = tmp_path / "both.html"
    assert main(["report", str(first), str(second), "-o", str(output)]) == 0
    shown = Page(output.read_text())
    assert [series["n"] for series in charts(shown)["Reward"]] == ["a/grpo", "b/grpo"]
    assert [len(series["p"]) for series in charts(shown)["Entropy"]] == [40, 20]
    assert re.search(r"learner\.max_staleness\n2\n5", shown.words)
    assert "batch.group_size" not in shown.words
    assert differences([read_run(first), read_run(first)]) == []


def test_samples_are_chosen_from_the_whole_course(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    samples = [
        made.sample(
            n, [], made.completion("a", n % 10 / 10), made.completion("b", 0.5, "error" if n % 20 == 0 else "finished")
        )
        for n in range(1, 601)
    ]
    made.lines(file, samples)
    chosen = choose(file, 1, 600)
    assert (chosen.recorded, chosen.broken) == (600, 0)
    good = [choice.sample["step"] for choice in chosen.choices if "good" in choice.labels]
    assert [(step - 1) // 100 for step in good] == [0, 1, 2, 3, 4, 5]
    assert all(step % 10 == 9 for step in good)
    failed = [choice.sample["step"] for choice in chosen.choices if "error" in choice.labels]
    assert sorted(failed) == [20, 220, 520]  # the first of their sixths
