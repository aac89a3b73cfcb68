"""A model card has the run's own figures and names, the hub can read it, and no path, secret or content is in it."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.config.load import dump_config, load_config
from asyncrl.config.schema import RunConfig
from asyncrl.journal.database import open_database
from asyncrl.run_folder.export_record import ExportRecord
from asyncrl.telemetry.recorder import CONFIG_FILE
from asyncrl_plugins.hub import sources
from asyncrl_plugins.hub.account import Account, History, read_account
from asyncrl_plugins.hub.card import Exported, _settings, model_card
from asyncrl_plugins.hub.sources import data_files, licence_of, licence_texts
from tests.rigs.adapters import MakeConfig


def card_of(config: RunConfig, run: Path, **fields: Any) -> str:
    return model_card(Exported(run, config, **{"step": None, "is_adapter": False, "dtype": "float32", **fields}))


def front_matter(card: str) -> dict[str, Any]:
    found = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    assert found
    return yaml.safe_load(found[1])


def written_run(folder: Path, config: RunConfig, steps: int) -> RunConfig:
    """A run without a journal, as a supervised one is, with records of so many steps."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(dump_config(config))
    metrics = [{"step": step, "reward/mean": step / 10, "rows/finished": 16.0} for step in range(1, steps + 1)]
    evaluations = [{"step": step, "accuracy": step / 100, "accuracy_error": 0.01} for step in range(0, steps + 1, 2)]
    for name, lines in (("metrics.jsonl", metrics), ("evaluations.jsonl", evaluations)):
        (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return config


def test_an_adapter_on_a_quantised_base_is_loaded_as_its_export_says(make_config: MakeConfig, tmp_path: Path) -> None:
    """On the plain base it is another policy."""
    lora = make_config(model={"lora": {"rank": 2}})
    model = lora.model.model_copy(update={"quantization": "nf4"})
    config = written_run(tmp_path, lora.model_copy(update={"model": model}), 2)
    page = '# An adapter\n\nBase in 4 bits.\n\n```python\nload("THIS_FOLDER")\n```\n'
    card = card_of(config, tmp_path, is_adapter=True, repository="acme/small", page=page)
    assert 'Base in 4 bits.\n\n```python\nload("acme/small")' in card
    assert "PeftModel.from_pretrained(base" not in card
    assert "another policy" in card_of(config, tmp_path, is_adapter=True)


@pytest.mark.slow
def test_a_finished_run_is_described_by_its_own_figures(finished_run: Path) -> None:
    config = load_config(finished_run / CONFIG_FILE, [])
    record = ExportRecord("merged", "float32", "float32", logprob_gap=0.00012, tokens=300)
    card = card_of(config, finished_run, step=5, record=record, repository="acme/digits")
    with closing(sqlite3.connect(f"file:{finished_run}/journal.sqlite?mode=ro&immutable=1", uri=True)) as db:
        counters = dict(db.execute("SELECT name, count FROM ledger"))
        (run_id,) = db.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
    issued = f"{counters['issued']} groups issued = {counters['trained']} trained"
    assert f"of run `{run_id}` with 5 steps: {issued} + 0 dropped (none)" in card
    assert "residual 0." in card
    assert "Largest residual at any of the 5 recorded steps: 0." in card
    evaluations = [json.loads(line) for line in (finished_run / "evaluations.jsonl").read_text().splitlines()]
    for line in evaluations:
        assert f"| {line['step']} | {line['accuracy']:.3f} ± {line['accuracy_error']:.3f} |" in card
    steps = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    trajectories = sum(int(step["rows/finished"] + step["rows/truncated"]) for step in steps)
    (by_status,) = re.findall(r"Trajectories by status: (.*)\.\n", card)
    assert sum(map(int, re.findall(r"\d+", by_status))) == trajectories
    assert "differ from the sampled policy by 0.00012 nats a token, over 300 tokens" in card
    (digest,) = [found for name, found in data_files([config.data.train_files[0]]) if name == "rl.parquet"]
    assert f"| training | `rl.parquet` | {digest} |" in card
    assert "| short | `short_reward.py:short` | 1.0 | `" in card
    assert "transformers 5" in card
    assert "`algorithm.updates_per_batch` | 2 |" in card
    assert "`trainer.max_steps` | 5 |" in card
    for folder in {finished_run.parent, Path(config.model.path).parent, Path(config.data.train_files[0]).parent}:
        assert str(folder) not in card, "no path of this machine"
    assert card == card_of(config, finished_run, step=5, record=record, repository="acme/digits")
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    loaded: dict[str, Any] = {}
    exec(code.replace("acme/digits", str(finished_run / "export")), loaded)
    assert loaded["model"].config.model_type == "qwen2_vl"
    assert loaded["processor"].tokenizer.eos_token


def test_the_hub_reads_base_licence_and_form_of_the_front_matter(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "README.md"
    base.write_text("---\nlicense: other\nlicense_name: qwen\nlicense_link: LICENSE\n---\n# A model\n")
    asked: list[tuple[str, str, str | None]] = []

    def cached(repository: str, file: str, revision: str | None = None) -> str:
        asked.append((repository, file, revision))
        return str(base)

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    monkeypatch.setattr("asyncrl_plugins.hub.card.read_config", lambda _: {"vision_config": {}})
    config = make_config(
        model={"path": "acme/base@v2", "lora": {"rank": 4}}, data={"train_files": ["acme/rows@train", "acme/rows@more"]}
    )
    run = tmp_path / "run"
    written_run(run, config, 1)
    card = card_of(config, run, is_adapter=True, dtype="bfloat16", repository="me/mine")
    assert front_matter(card) == {
        "license": "other",
        "license_name": "qwen",
        "license_link": "LICENSE",
        "base_model": "acme/base",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "image-text-to-text",
        "datasets": ["acme/rows"],
        "tags": ["asyncrl", "sft"],
    }
    assert set(asked) == {("acme/base", "README.md", "v2")}
    assert 'base = AutoModelForImageTextToText.from_pretrained("acme/base", dtype="bfloat16")' in card
    assert 'model = PeftModel.from_pretrained(base, "me/mine")' in card
    assert "That of the base model, acme/base: other, qwen, LICENSE." in card
    assert "| training | `acme/rows@train` | of the hub |" in card


def test_the_curve_is_a_small_table_with_means_between_its_rows(make_config: MakeConfig, tmp_path: Path) -> None:
    config = written_run(tmp_path, make_config(), 40)
    lines = re.findall(r"^\| (\d+) \| (\S+) ± 0.010 \| (\S+) \|$", card_of(config, tmp_path), re.MULTILINE)
    assert [int(step) for step, _, _ in lines] == [0, 6, 12, 18, 22, 28, 34, 40], "first and last among 8"
    assert [accuracy for _, accuracy, _ in lines][-1] == "0.400"
    assert [mean for _, _, mean in lines][:3] == ["-", "0.350", "0.950"], "of steps 1 to 6, and 7 to 12"
    halfway = card_of(config, tmp_path, step=10)
    assert "| 10 | 0.100 ± 0.010 |" in halfway
    assert "| 12 |" not in halfway, "later steps are not of the checkpoint"


def test_nothing_that_a_user_wrote_as_a_value_of_a_free_name_is_shown(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(
        reward={"functions": [{"function": f"{__file__}:reward", "kwargs": {"key": "secret-2"}}]},
        environment={
            "name": f"{tmp_path}/mine.py:Maze",
            "config": {"password": "secret-3"},
            "limits": {"tokens_per_turn": 8},
        },
        data={"chat_template_kwargs": {"word": "secret-4"}},
        algorithm={"adv_estimator": f"{tmp_path}/mine.py:credit"},
    )
    card = card_of(written_run(tmp_path, config, 1), tmp_path)
    assert "secret" not in card
    assert str(tmp_path) not in card
    assert "| `algorithm.adv_estimator` | mine.py:credit |" in card
    assert "the environment `mine.py:Maze`" in card
    assert list(_settings({"rollout": {"engine_args": {"api_key": "secret"}}, "reward": {"workers": 3}})) == []


def reward(sample: Any) -> float:
    return 1.0


def test_an_account_that_does_not_add_up_is_said(tmp_path: Path) -> None:
    with closing(open_database(tmp_path / "journal.sqlite", "process", begun=False)) as db:
        counts = {"issued": 12, "trained": 6, "dropped_stale": 2, "dropped_zero_variance": 1, "dropped_other": 0}
        db.executemany("INSERT INTO ledger VALUES (?, ?)", counts.items())
        db.execute("INSERT INTO tickets VALUES (7, 7, 0, 1)")
    account = read_account(tmp_path)
    assert account == Account(issued=12, trained=6, dropped={"stale": 2, "zero_variance": 1}, unfinished=1)
    assert account.residual == 2


def test_numbers_that_are_none_are_left_out_of_means() -> None:
    steps = [{"step": 1, "loss": None}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 3.0}, {"step": 4, "loss": True}]
    history = History(steps, [])
    assert history.mean("loss", 0, 4) == 2.0
    assert history.mean("loss", 3, 4) is None
    assert history.largest("loss") == 3.0
    assert history.points(8) == [1, 2, 3, 4]


def test_data_files_are_named_and_hashed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"abc")
    (tmp_path / "b.jsonl").write_bytes(b"")
    (tmp_path / "pictures").mkdir()
    found = list(data_files([f"{tmp_path}/*.jsonl", f"{tmp_path}/pictures", f"{tmp_path}/gone.parquet"]))
    assert found == [
        ("a.jsonl", "ba7816bf8f01cfea"),  # FIPS 180-2, appendix B.1
        ("b.jsonl", "e3b0c44298fc1c14"),
        ("pictures", "a folder"),
        ("gone.parquet", "no longer there"),
    ]


@pytest.mark.parametrize(
    ("card", "named"),
    [
        ("---\nlicense: apache-2.0\n---\n", {"license": "apache-2.0"}),
        ("---\nlanguage: en\n---\n", {}),
        ("---\n{broken\n---\n", {}),
        ("# no front matter\nlicense: mit\n", {}),
        (None, {}),
    ],
)
def test_a_licence_is_what_the_base_folder_names(
    make_config: MakeConfig, tmp_path: Path, card: str | None, named: dict[str, str]
) -> None:
    model = make_config().model.model_copy(update={"path": str(tmp_path)})
    (tmp_path / "LICENSE.txt").touch()
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    assert licence_of(model) == named
    assert licence_texts(model) == ["LICENSE.txt"]
    assert sources.hub_model(model) == ""
