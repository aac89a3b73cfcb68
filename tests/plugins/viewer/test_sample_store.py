"""The store of samples, read while a run trains and after it: lists, filters, groups in full, and what is missing."""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.config.load import dump_config
from asyncrl.config.schema import RunConfig
from asyncrl.errors import BadStateError, UserError
from asyncrl.journal import JOURNAL_FILE
from asyncrl.journal.full_disk import is_disk_full
from asyncrl.journal.writer import Journal
from asyncrl.processing.processor import PromptProcessor
from asyncrl_plugins.viewer.inspect.__main__ import main as inspect
from asyncrl_plugins.viewer.inspect.filters import read_query
from asyncrl_plugins.viewer.samples import query as queries
from asyncrl_plugins.viewer.samples.model import Order, SampleQuery, SampleRow
from asyncrl_plugins.viewer.samples.sample_index import INDEX_FILE, TABLES, PromptText, SampleIndex, insert_group
from asyncrl_plugins.viewer.samples.store import SampleStore
from learner.training.batch import Batch, TrainedBatch
from learner.training.roles import Roles
from learner.training.step import LearnerStep
from protocol.codec import encode
from protocol.messages import TokenSource
from tests.rigs.file_sizes import file_size_limit
from tests.rigs.fuzz import content as fuzz
from tests.rigs.made_up_batch import KeepGradients, made_up_batch

EVERYTHING = 1000
FIRST = 3
"""A step whose version may consume the made-up batch: its tokens are of versions 0 to 2."""


@dataclass
class MadeUpRun:
    folder: Path
    config: RunConfig
    batch: Batch
    trained: TrainedBatch
    journal: Journal
    index: SampleIndex

    def consume(self, step: int, *numbers: int) -> None:
        """In the journal alone, as before the step."""
        with self.journal.transaction():
            self.journal.consume(step, [self.batch.received[number].slot for number in numbers])
            self.journal.count(trained=len(numbers))

    def report(self, step: int, *numbers: int) -> None:
        """In the index, as after it."""
        received = [self.batch.received[number] for number in numbers]
        parts = [self.part(number) for number in numbers]
        columns = (np.concatenate([getattr(p, name) for p in parts]) for name in ("advantages", "logprobs", "masked"))
        batch = [(item.ticket.prompt, item.group) for item in received]
        self.index.write(step, step - 1, batch, TrainedBatch(*columns))

    def part(self, number: int) -> TrainedBatch:
        """Of one group."""
        lengths = [int(item.group.lengths.sum()) for item in self.batch.received]
        size = self.config.batch.group_size
        return self.trained.part(number * size, size, sum(lengths[:number]), lengths[number])


@pytest.fixture
def run(tmp_path: Path, make_config: Callable[..., RunConfig]) -> Iterator[MadeUpRun]:
    """Two steps of a group and two groups; the fourth group waits."""
    config = make_config()
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(config))
    batch = made_up_batch(config, PromptProcessor(config.model))
    journal, index = Journal(folder / JOURNAL_FILE), SampleIndex(folder)
    with journal.transaction():
        journal.add_tickets([item.slot for item in batch.received])
        for item in batch.received:
            journal.add_group(item.slot.ticket_id, encode(item.group))
        journal.count(issued=len(batch.received))
    made = MadeUpRun(folder, config, batch, make_up_training(batch), journal, index)
    for step, numbers in ((FIRST, (0,)), (FIRST + 1, (1, 2))):
        made.consume(step, *numbers)
        made.report(step, *numbers)
    yield made
    index.close()
    journal.close()


def make_up_training(batch: Batch) -> TrainedBatch:
    random = np.random.default_rng(1)
    behaviour = batch.behaviour_logprobs.numpy()
    logprobs = behaviour + random.normal(0, 0.3, len(behaviour)).astype(np.float32)
    sampled = np.concatenate([item.group.is_sampled for item in batch.received])
    scored = np.repeat(~np.isnan(batch.scores.numpy()), np.concatenate([item.group.lengths for item in batch.received]))
    trained = sampled & scored
    advantages = random.normal(size=len(batch.scores)).astype(np.float32)
    return TrainedBatch(advantages, np.where(trained, logprobs, np.nan), trained & (random.random(len(trained)) < 0.2))


@pytest.fixture
def store(run: MadeUpRun) -> Iterator[SampleStore]:
    with closing(SampleStore(run.folder)) as opened:
        yield opened


def everything(store: SampleStore) -> tuple[SampleRow, ...]:
    return store.find(SampleQuery(), limit=EVERYTHING).rows


def test_every_sample_is_in_the_list_newest_first(run: MadeUpRun, store: SampleStore) -> None:
    rows = everything(store)
    assert [(row.step, row.ticket_id, row.trajectory) for row in rows] == [
        (step, ticket_id, number) for step, ticket_id in ((4, 2), (4, 1), (3, 0)) for number in range(4)
    ]
    row = next(row for row in rows if (row.ticket_id, row.trajectory) == (1, 0))
    item, part = run.batch.received[1], run.part(1)
    record, length = item.group.trajectories[0], int(item.group.lengths[0])
    difference = np.abs(part.logprobs - item.group.logprobs)[:length]
    assert row == SampleRow(
        ticket_id=1,
        trajectory=0,
        step=4,
        row_id=item.ticket.prompt.row_id,
        prompt=row.prompt,
        answer=str(item.ticket.prompt.answer),
        status="finished",
        finish_reason="stop",
        reward=record.reward,
        advantage=float(part.advantages[0]),
        length=length,
        staleness=2,
        logprob_diff_max=float(np.nanmax(difference)),
        error="",
        has_payload=True,
        completion=row.completion,
    )
    assert row.prompt.startswith("<image>What is")
    assert row.completion
    failed = next(row for row in rows if (row.ticket_id, row.trajectory) == (1, 2))
    assert (failed.reward, failed.logprob_diff_max, failed.error) == (None, None, "reward_exception")


@pytest.mark.parametrize(
    ("query", "fits"),
    [
        (SampleQuery(steps=(4, 9)), lambda row: row.step == 4),
        (SampleQuery(rewards=(0.3, 0.7)), lambda row: 0.3 <= (row.reward or 0) <= 0.7),
        (SampleQuery(statuses=("error", "truncated")), lambda row: row.status == "error"),
        (SampleQuery(staleness=(1, 1)), lambda row: row.staleness == 1),
        (SampleQuery(prompt="WHAT IS THE SUM"), lambda row: "What is the sum" in row.prompt),
        (SampleQuery(prompt="%"), lambda row: False),
        (
            SampleQuery((3, 4), (0.2, 0.9), ("finished",), (1, 5), "largest"),
            lambda row: 0.2 <= (row.reward or 0) <= 0.9 and row.staleness and "largest" in row.prompt,
        ),
    ],
    ids=["step", "reward", "status", "staleness", "prompt", "percent sign", "all of them"],
)
def test_a_filter_finds_what_fits_and_nothing_else(
    store: SampleStore, query: SampleQuery, fits: Callable[[SampleRow], bool]
) -> None:
    expected = [row for row in everything(store) if fits(row)]
    page = store.find(query, limit=EVERYTHING)
    assert (list(page.rows), page.total) == (expected, len(expected))


@pytest.mark.parametrize(
    ("order", "key"),
    [
        ("oldest", lambda row: row.step),
        ("best", lambda row: math.inf if row.reward is None else -row.reward),
        ("worst", lambda row: math.inf if row.reward is None else row.reward),
        ("stalest", lambda row: -row.staleness),
        ("longest", lambda row: -row.length),
    ],
)
def test_orders_and_pages(store: SampleStore, order: Order, key: Callable[[SampleRow], float]) -> None:
    query = SampleQuery(order=order)
    rows = store.find(query, limit=EVERYTHING).rows
    assert set(rows) == set(everything(store))
    assert [key(row) for row in rows] == sorted(key(row) for row in rows)
    pages = [store.find(query, limit=3, offset=start) for start in range(0, 15, 3)]
    assert [row for page in pages for row in page.rows] == list(rows)
    assert {page.total for page in pages} == {12}


def test_a_group_in_full(run: MadeUpRun, store: SampleStore) -> None:
    detail = store.detail(1)
    item, part = run.batch.received[1], run.part(1)
    prompt = item.ticket.prompt
    assert (detail.step, detail.server_id, detail.row_id, detail.problem) == (4, "s", prompt.row_id, "")
    assert detail.messages[-1]["role"] == "user"
    assert [image.hash for image in detail.images] == list(prompt.image_hashes)
    assert [image.data for image in detail.images] == [item.prepared.blobs[digest] for digest in prompt.image_hashes]
    ends = np.cumsum(item.group.lengths)
    processor = PromptProcessor(run.config.model)
    for number, (trajectory, end) in enumerate(zip(detail.trajectories, ends, strict=True)):
        here = slice(int(end - item.group.lengths[number]), int(end))
        for name in ("token_ids", "logprobs", "source", "versions"):
            assert np.array_equal(getattr(trajectory, name), getattr(item.group, name)[here])
        assert np.array_equal(trajectory.masked, part.masked[here])
        assert "".join(trajectory.tokens) == processor.tokenizer.decode(trajectory.token_ids.tolist())
        assert len(trajectory.tokens) == len(trajectory.token_ids)
        assert trajectory.learner_logprobs is not None
        np.testing.assert_allclose(trajectory.learner_logprobs, part.logprobs[here], atol=2e-3)
    failed = detail.trajectories[2]
    assert failed.learner_logprobs is not None
    assert np.isnan(failed.learner_logprobs).all(), "it was not scored, so nothing was trained"
    assert failed.row.error == "reward_exception"
    with pytest.raises(UserError, match="no sample of ticket 77"):
        store.detail(77)


def test_an_open_store_follows_the_learner(run: MadeUpRun, store: SampleStore) -> None:
    before = everything(store)
    run.consume(5, 3)
    assert everything(store) == before, "taken, and not trained yet"
    run.report(5, 3)
    rows = everything(store)
    assert (rows[0].step, rows[0].advantage) == (5, float(run.part(3).advantages[0]))
    assert rows[4:] == before
    run.index.truncate_after(3)
    assert {row.ticket_id for row in everything(store)} == {0}, "a resumed run forgets what it will make anew"


def test_of_a_group_that_is_not_kept_the_row_stays(run: MadeUpRun, store: SampleStore) -> None:
    everything(store)
    first = run.journal.forget_payloads(3)
    run.index.forget_tokens(first)
    rows = {row.ticket_id: row.has_payload for row in everything(store)}
    assert rows == {0: False, 1: True, 2: True}
    detail = store.detail(0)
    assert "no longer kept" in detail.problem
    assert [t.row.reward for t in detail.trajectories] == [r.reward for r in run.batch.received[0].group.trajectories]
    assert detail.images[0].data
    assert not detail.trajectories[0].tokens
    assert store.detail(1).trajectories[0].learner_logprobs is not None


@pytest.mark.parametrize(
    ("harm", "state"), [(Path.unlink, "missing"), (lambda file: os.truncate(file, 10), "cut off or damaged")]
)
def test_a_file_that_cannot_be_read_is_named(
    run: MadeUpRun, store: SampleStore, capsys: pytest.CaptureFixture[str], harm: Callable[[Path], None], state: str
) -> None:
    assert inspect(["--ticket", "1", str(run.folder)]) == 0
    for file in run.folder.glob(f"{JOURNAL_FILE}.groups-*"):
        harm(file)
    detail = store.detail(1)
    assert re.fullmatch(rf"its tokens cannot be read: .*\.groups-\d+ is {state}\. Restore that file.*", detail.problem)
    assert [trajectory.row.reward for trajectory in detail.trajectories], "its rows are in the index"
    capsys.readouterr()
    for words in (["--json"], []):
        assert inspect(["--ticket", "1", str(run.folder), *words]) == 1
        printed = capsys.readouterr()
        assert printed.out
        assert printed.err.startswith("error: ticket 1: its tokens cannot be read: ")
    run.journal.forget_payloads(3)
    assert inspect(["--ticket", "0", str(run.folder)]) == 0, "forgotten as the configuration says"


def test_a_configuration_that_cannot_be_read_is_one_line(run: MadeUpRun, capsys: pytest.CaptureFixture[str]) -> None:
    for content, reason in ((b"run_dir: \xff\xfe", "cannot read "), (b"model: 3", "it has not model, data, trainer. ")):
        (run.folder / "config.yaml").write_bytes(content)
        assert inspect([str(run.folder)]) == 2
        (message,) = capsys.readouterr().err.splitlines()
        assert reason in message


def test_a_learners_index_that_finds_no_room_is_a_full_disk(run: MadeUpRun) -> None:
    run.index.close()
    with file_size_limit(4096), pytest.raises(OSError, match="File too large") as caught:
        run.index.truncate_after(FIRST)
    assert is_disk_full(caught.value)


def test_without_an_index_the_journal_is_shown(run: MadeUpRun) -> None:
    with closing(SampleStore(run.folder)) as store:
        before = everything(store)
    run.index.close()
    (run.folder / INDEX_FILE).unlink()
    with closing(SampleStore(run.folder)) as store:
        found = everything(store)
        assert [(row.step, row.ticket_id, row.trajectory, row.reward) for row in found] == [
            (row.step, row.ticket_id, row.trajectory, row.reward) for row in before
        ]
        assert "What is" in found[0].prompt, "decoded from its tokens"
        assert store.detail(1).trajectories[0].learner_logprobs is None
        run.consume(5, 3)
        assert everything(store)[0].step == 5
        run.report(5, 3)
        assert {row.ticket_id for row in everything(store)} == {3}, "the index, from the moment that there is one"


def test_a_damaged_index_is_said_to_be_one(run: MadeUpRun) -> None:
    run.index.close()
    file = run.folder / INDEX_FILE
    file.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 64)
    with (
        closing(SampleStore(run.folder)) as store,
        pytest.raises(UserError, match=r"cannot be read: .* Move it"),
    ):
        everything(store)
    with pytest.raises(BadStateError, match=f"{file} cannot be written: .* move it away, and --resume"):
        run.report(5, 3)


def test_images_come_from_the_run_directory_or_from_data_that_have_not_changed(run: MadeUpRun) -> None:
    file, text = run.folder / "config.yaml", (run.folder / "config.yaml").read_text()
    prompt, blobs = run.batch.received[1].ticket.prompt, run.batch.received[1].prepared.blobs
    digest = prompt.image_hashes[0]
    for name, problem in (("eval", "has changed"), ("gone", "there is no data file"), ("", "has no config.yaml")):
        file.write_text(text.replace("rl.parquet", f"{name}.parquet")) if name else file.unlink()
        with closing(SampleStore(run.folder)) as store:
            image = store.detail(1).images[0]
        assert image.data is None
        assert problem in image.problem
    (run.folder / "images").mkdir()
    (run.folder / "images" / f"{digest}.png").write_bytes(blobs[digest])
    with closing(SampleStore(run.folder)) as store:
        assert store.detail(1).images[0].data == blobs[digest]
        assert "no tokenizer" in store.detail(1).problem


def test_inspect_loads_no_torch(run: MadeUpRun) -> None:
    code = (
        "import sys, asyncrl_plugins.viewer.inspect.server; from asyncrl_plugins.viewer.inspect.__main__ import main; "
        "main([sys.argv[1]]); main([sys.argv[1], '--ticket', '1']); "
        "print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, run.folder], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_step_hands_out_what_its_metrics_summarise(make_config: Callable[..., RunConfig], one_thread: None) -> None:
    config = make_config(
        algorithm={"updates_per_batch": 2, "correction": {"kind": "token_mis", "lower": 0.99, "upper": 1.01}},
        batch={"tokens_per_microbatch": 256},
    )
    torch.manual_seed(0)
    engine = KeepGradients(config.model_settings, config.learner.optim, 1)
    engine.prepare()
    batch = made_up_batch(config, PromptProcessor(config.model))
    step = LearnerStep(Roles(engine), config.step_settings)
    values = step(batch, 2)
    trained = ~np.isnan(step.trained.logprobs)
    scored = np.repeat(~np.isnan(batch.scores.numpy()), np.concatenate([i.group.lengths for i in batch.received]))
    sampled = np.concatenate([item.group.is_sampled for item in batch.received])
    assert np.array_equal(trained, sampled & scored)
    difference = (step.trained.logprobs - batch.behaviour_logprobs.numpy())[trained]
    assert np.abs(difference).max() == pytest.approx(values["logprob_diff_max"])
    assert 0 < step.trained.masked[trained].mean() == pytest.approx(values["mask_fraction"])
    assert not step.trained.masked[~trained].any()
    assert step.trained.advantages.shape == (16,)


def test_tokens_that_were_put_there_are_marked_and_differ_from_no_engine(
    tmp_path: Path, make_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """A group of a demonstration, a hint, a sampled completion and a greedy one."""
    config = make_config()
    item = made_up_batch(config, PromptProcessor(config.model)).received[0]
    begins, lengths = np.cumsum(item.group.lengths) - item.group.lengths, item.group.lengths.tolist()
    source, logprobs = np.full(sum(lengths), TokenSource.POLICY, np.uint8), np.full(sum(lengths), -1.0, np.float32)
    for row, count in ((0, lengths[0]), (1, 2)):
        source[begins[row] : begins[row] + count] = TokenSource.INSERTED
    learner = logprobs + np.float32(0.25)
    learner[source != TokenSource.POLICY] = -7.0
    group = item.group.model_copy(
        update={"source": source, "logprobs": np.where(source == TokenSource.POLICY, logprobs, np.float32(0))}
    )
    run = tmp_path / "run"
    run.mkdir()
    sizes = config.model_copy(update={"batch": config.batch.model_copy(update={"group_size": 3})})
    (run / "config.yaml").write_text(dump_config(sizes))
    journal, index = Journal(run / JOURNAL_FILE), SampleIndex(run)
    with closing(journal), closing(index):
        with journal.transaction():
            journal.add_tickets([item.slot])
            journal.add_group(item.slot.ticket_id, encode(group))
            journal.consume(FIRST, [item.slot])
            journal.count(issued=1, trained=1)
        trained = TrainedBatch(np.zeros(4, np.float32), learner, np.zeros(len(source), bool))
        index.write(FIRST, FIRST - 1, [(item.ticket.prompt, group)], trained)
    ticket = str(item.slot.ticket_id)
    assert inspect([str(run), "--ticket", ticket, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["trajectories"]
    assert [row["origin"] for row in rows] == ["demonstration", "hint of 2 tokens", "", "greedy"]
    assert [row["put_there"] for row in rows] == [lengths[0], 2, 0, 0]
    assert [row["logprob_diff_max"] for row in rows] == [None, *[pytest.approx(0.25)] * 3]
    assert rows[1]["logprobs"][:3] == [None, None, -1.0]
    assert rows[1]["learner_logprobs"][:2] == [-7.0, -7.0]
    assert inspect([str(run)]) == 0
    listed = capsys.readouterr().out
    assert all(origin in listed for origin in ("demonstration", "hint of 2 tokens", "greedy"))
    assert inspect([str(run), "--ticket", ticket]) == 0
    assert "learner -7" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ({"end": "turns"}, [(7, 0)]),
        ({"end": "done"}, []),
        ({"tool": "crop"}, [(7, 0)]),
        ({"tool": "cro"}, []),
        ({"error": "any"}, [(7, 0)]),
        ({"error": "malformed"}, []),
        ({"tool": "crop", "error": "tool, arguments", "end": "turns,cut"}, [(7, 0)]),
        ({"tool": "look", "error": "any"}, []),
        ({"tool": "|crop"}, []),
        ({}, [(7, 0), (7, 1), (8, 0), (8, 1)]),
    ],
)
def test_trajectories_are_found_by_their_end_and_their_calls(
    words: dict[str, str], found: list[tuple[int, int]]
) -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.executescript(TABLES)
        asked = PromptText("row", ({"role": "user", "content": "q"},), "a", ())
        for group in (fuzz.conversation(7), fuzz.group(8, 0, "server-0", [3, 4])):
            insert_group(db, group, asked, step=1, version=0)
        assert sorted(queries.find(db, read_query(words), 10, 0)) == found
        assert queries.count(db, read_query(words)) == len(found)
