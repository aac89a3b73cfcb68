"""The study of the demo of pictures: pieces are made once, a supervised run costs what GRPO has, pages say what is."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.data.survey.held_out import held_out_prompts
from asyncrl_plugins.evaluation.plain_scores import complete_held_out
from benchmarks import easy_vqa, easy_vqa_report, easy_vqa_scores
from benchmarks.easy_vqa_scores import GreedyPolicy
from tests.rigs.tiny_families import make_llava
from tests.system.test_bad_input import image_rows, write_rows

ASKED = (0, "What is it?"), (1, "What is it?"), (1, "Is it a seven, or a nine?"), (2, "Look: which one?"), (3, "Eh?")
"""Pictures and questions."""
ROWS = [("What is the red shape?", "circle"), ("What is the red shape?", "circle"), ("What is the red shape?", "yes")]


class Study(easy_vqa.Study):
    """A study whose commands cost CPU seconds and write what a real one writes, and are not run: 20 s to load, then 300
    for GRPO, or 3 for a step of supervised training."""

    cost = 0.0
    stopped = ""
    """Name of a run that a signal stops after 10 steps."""
    calls: list[str]

    def _call(self, name: str, *words: str) -> None:
        self.calls = [*getattr(self, "calls", []), name]
        given = dict(word.split("=", 1) for word in words if "=" in word)
        if name == "prepare":
            (self.folder / "start").mkdir(exist_ok=True)
            (self.folder / "start" / "config.yaml").touch()
            (self.folder / "data-1").mkdir(exist_ok=True)
            prompts, answers = zip(*ROWS, strict=True)
            table = pa.table({"images": [[b""]] * 3, "prompt": prompts, "answer": answers})
            for file in ("rl", "eval", "test_all"):
                pq.write_table(table, self.folder / "data-1" / f"{file}.parquet")
        elif "--out" in words:
            told = {"kind": "shape", "seen": True, "picture": 1, "completion": "red? red. Answer: yes"}
            rows = [{**told, "question": text, "answer": answer, "right": answer == "yes"} for text, answer in ROWS]
            Path(words[-1]).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        else:
            checkpoint = Path(given["run_dir"]) / "checkpoints" / "step-000010"
            if name == self.stopped:
                checkpoint.mkdir(parents=True, exist_ok=True)
                self.cost += 50
                raise KeyboardInterrupt
            Path(given["run_dir"]).mkdir(exist_ok=checkpoint.is_dir())
            left = int(given.get("sft.steps", 100)) - (10 if checkpoint.is_dir() else 0)
            assert ("--resume" in words) == ("sft" in words and checkpoint.is_dir())
            self.cost += 20 + 3 * left


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    study = Study(tmp_path, ())
    monkeypatch.setattr(easy_vqa, "_children", lambda: study.cost)
    return study


def test_pieces_that_are_done_are_not_made_again(study: Study) -> None:
    study.train("grpo", 1)
    study.score("grpo", 1, "test")
    assert study.calls == ["prepare", "prepare", "grpo-1", "grpo-1-halfway", "grpo-1-balanced", "grpo-1-test"]
    again = Study(study.folder, ())
    again.train("grpo", 1)
    again.score("grpo", 1, "test")
    assert not hasattr(again, "calls")
    assert [each["accuracy"] for each in again.records if each["piece"] == "test"] == [0.33333]


def test_supervised_training_takes_the_cpu_seconds_of_grpo(study: Study) -> None:
    """Two short runs tell 20 s for loading and 3 s a step: 100 steps take GRPO's 320 s."""
    study.train("grpo", 1)
    study.train("sft", 1)
    spent = {each["cell"]: (each["steps"], each["cpu_s"]) for each in study.records if each["piece"] == "train"}
    assert spent == {"grpo-1": (60, 320), "sft-of-2": (2, 26), "sft-of-12": (12, 56), "sft-1": (100, 320)}


def stop(study: Study, name: str, arm: str) -> None:
    study.stopped = name
    with pytest.raises(KeyboardInterrupt):
        study.train(arm, 1)
    study.stopped = ""


def test_an_interrupted_run_goes_on_and_a_killed_one_is_made_again(study: Study) -> None:
    run, spent = study.folder / "grpo-1", study.folder / "grpo-1.cpu"
    stop(study, "grpo-1", "grpo")
    stop(study, "grpo-1", "grpo")
    assert (spent.read_text(), (run / "checkpoints").is_dir()) == ("100.0", True)
    spent.unlink()  # a killed study writes none
    study.train("grpo", 1)
    assert not (run / "checkpoints").exists()
    assert study._record("grpo-1", "train")["cpu_s"] == 320


def test_an_interrupted_supervised_run_goes_on_and_what_a_step_costs_is_of_whole_runs(study: Study) -> None:
    study.train("grpo", 1)
    stop(study, "sft-of-12", "sft")
    stop(study, "sft-1", "sft")
    study.train("sft", 1)
    assert study._record("sft-of-12", "train")["cpu_s"] == 56
    record = study._record("sft-1", "train")
    assert (record["steps"], record["cpu_s"]) == (100, 320 + 20), "it has loaded twice"
    assert (study.folder / "sft-1" / "checkpoints").is_dir()


def test_a_supervised_run_that_stopped_before_its_first_step_is_made_again(study: Study) -> None:
    study.train("grpo", 1)
    stop(study, "sft-1", "sft")
    (study.folder / "sft-1" / "checkpoints" / "step-000010").rmdir()
    study.train("sft", 1)
    assert study._record("sft-1", "train")["cpu_s"] == 320, "what was lost is not counted"


def test_majority_of_a_question_s_text(study: Study) -> None:
    study.majority()
    (record,) = (each for each in study.records if each["piece"] == "balanced")
    assert record["accuracy"] == 0.66667
    assert record["by_kind"] == {"shape": [3, 0.66667]}


@pytest.mark.parametrize("sees", [True, False])
def test_whatever_is_guessed_the_greedy_completion_comes_out(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sees: bool
) -> None:
    """Beside transformers' own `generate`; right guesses are not decoded again."""
    pictures = [{"images": [str(tmp_path / f"{at}.png")], "prompt": f"<image>{words}"} for at, words in ASKED]
    image_rows(tmp_path, [(56, 56)] * 4)
    data = write_rows(tmp_path, pictures if sees else [{"prompt": words} for _, words in ASKED])
    data |= {"val_files": data["train_files"], "max_prompt_length": 80, "max_response_length": 6}
    config = make_config(model={"path": str(make_llava(tmp_path / "model"))}, data=data)
    folder = Path(config.model.path)
    greedy = [sample.completion for sample in complete_held_out(config, folder)]
    policy = GreedyPolicy(config, folder)
    rows = list(held_out_prompts(config.data, policy.processor, config.network.max_message_mib)[1])
    assert policy.complete(rows, ["wrong"] * len(rows)) == greedy
    assert len(set(greedy)) > 1
    decode, tokens = policy._decode, list[list[int]]()
    monkeypatch.setattr(policy, "_decode", lambda *batch: tokens.extend(found := decode(*batch)) or found)
    for row in rows:
        policy.complete([row], ["wrong"])
    monkeypatch.setattr(policy.processor, "tokenize_completion", lambda place: tokens[int(place)])
    monkeypatch.setattr(policy, "_decode", None)
    monkeypatch.setattr(policy, "_rough", policy.model)
    monkeypatch.setattr(easy_vqa_scores, "MARGIN", 0.0)
    assert policy.complete(rows, [str(place) for place in range(len(rows))]) == greedy


def record(arm: str, seed: int, piece: str, **more: Any) -> dict[str, Any]:
    host = {"date": "2026-11-29", "cpu": "CPU", "cores": 2, "torch": "2", "transformers": "5"}
    return {"cell": f"{arm}-{seed}", "arm": arm, "seed": seed, "piece": piece, "cpu_s": 9.0, **host, **more}


def scored(arm: str, seed: int, right: int) -> dict[str, Any]:
    return record(arm, seed, "test", rows=1000, accuracy=right / 1000, by_kind={"colour": [1000, right / 1000]})


@pytest.mark.parametrize(
    ("grpo", "sft", "said"),
    [
        (
            (990, 980, 985),
            (900, 910, 890),
            "**GRPO gains over supervised training of the same cost**: +0.0850 ± 0.0076",
        ),
        ((900, 910, 890), (990, 980, 985), "**supervised training of the same cost is better than GRPO**: -0.0850"),
        ((990, 980, 985), (985, 990, 979), "**GRPO and supervised training of the same cost are not told apart**"),
        ((990,), (900,), "+0.0900 ± 0.0100 on the whole test split (seed 1 alone"),
    ],
)
def test_the_page_says_what_grpo_gains_either_way(grpo: Sequence[int], sft: Sequence[int], said: str) -> None:
    records = [scored("grpo", seed, right) for seed, right in enumerate(grpo, 1)]
    records += [scored("sft", seed, right) for seed, right in enumerate(sft, 1)]
    assert said in easy_vqa_report.page(records)
    assert "GRPO without pictures (runs of seeds 1, 2, 3; test split of seeds 1, 2, 3)" in easy_vqa_report.page(records)


def test_page_and_table_are_those_of_the_records() -> None:
    records = easy_vqa.read_records(easy_vqa_report.MEASURED)
    hint = "run: python -m benchmarks.easy_vqa_report"
    assert easy_vqa_report.PAGE.read_text() == easy_vqa_report.page(records), hint
    results = easy_vqa_report.RESULTS.read_text()
    assert easy_vqa_report.table(records) in results, hint
    assert results == easy_vqa_report.with_table(results, records), hint
    if easy_vqa_report.SHEET.name in easy_vqa_report.PAGE.read_text():
        assert easy_vqa_report.SHEET.stat().st_size < 150_000
