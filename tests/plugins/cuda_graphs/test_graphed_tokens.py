"""Captured decode steps sample the tokens of the core's decode batch: rows join and leave, and weights change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.models.loading import load_model
from asyncrl.models.published import load_published, published_tensors
from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl_plugins.cuda_graphs.batch import GraphedBatch
from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.hf.decode_batch import DecodeBatch, DecodeRow
from rollout_server.engines.hf.grouped_attention import for_decoding
from tests.plugins.cuda_graphs.recorded_steps import RecordedCapture
from tests.plugins.cuda_graphs.small_models import (
    TEXT,
    graphed,
    largest_difference,
    requests,
    run,
    text_model,
    tokens_of,
)
from tests.rigs.policies import CPU, MakeConfig, moved, prompts, request_for
from tests.rigs.tiny_families import Family, make_family

__all__ = ["prompts"]

SAME = 1e-5
"""Largest difference of a log-prob in nats: attention sums over other columns, some of them masked."""


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


def compare(model: Any, waves: Sequence[Sequence[GenerationRequest]], *, rebuilds: bool = False) -> None:
    """Sample by the core's batch, by steps over whole blocks of memory, and by captured ones."""
    capture, found = RecordedCapture(), list[list[DecodeRow]]()
    for batch in (DecodeBatch(model, (), CPU), graphed(model, None), graphed(model, lambda: capture)):
        found.append(run(batch, waves, batch.rebuild_cache if rebuilds else lambda: None))
        if isinstance(batch, GraphedBatch):
            assert batch._graphs.failure == ""
            assert batch._tensors is not None
            assert batch._tensors.logits is not None
            assert batch._tensors.logits.isfinite().all(), "of slots without a sequence, too"
            assert largest_difference(found[-1], found[0]) <= SAME
    assert capture.replays > capture.captures > 0


@pytest.mark.parametrize("name", TEXT)
@pytest.mark.parametrize("rebuilds", [False, True], ids=["as it is", "rebuilt cache"])
def test_rows_that_join_and_leave(name: str, rebuilds: bool) -> None:
    """The longest prompt comes when others run; rows end at different steps; 60 columns are two blocks."""
    first, second, third, last = requests(9, 3, 30, 14, tokens=15)
    compare(text_model(name), [[first, second], [third], [last]], rebuilds=rebuilds)


def test_equal_prompts_over_several_blocks() -> None:
    compare(text_model(), [requests(20, 20, tokens=90, size=2)])


def test_one_sequence_alone() -> None:
    compare(text_model(), [requests(5, tokens=40, size=1)])


def test_more_sequences_than_the_plan_counts_with() -> None:
    """Whoever admits them, they are decoded."""
    compare(text_model(), [requests(6, 4, tokens=8, size=15)])


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_images_and_their_positions(
    family: Family, make_config: MakeConfig, prompts: tuple[EncodedPrompt, ...], tmp_path: Path
) -> None:
    config = make_config(model={"path": str(make_family(family, tmp_path / "model"))})
    model: Any = load_model(config.model, device=CPU)
    for_decoding(model.eval().requires_grad_(False), groups_queries=True)
    waves = [[request_for(config, prompt, i, tokens=9 + 4 * i)] for i, prompt in enumerate(prompts)]
    compare(model, waves, rebuilds=True)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_weights_change_under_running_sequences(mode: str) -> None:
    """Graphs read the weights where they were, which is where new ones are copied to."""
    waves, capture, found = [requests(9, 3, tokens=20)], RecordedCapture(), list[list[DecodeRow]]()
    for captures in (False, True):
        model = text_model()
        batch = graphed(model, lambda: capture) if captures else DecodeBatch(model, (), CPU)
        before = {name: tensor.clone() for name, tensor in published_tensors(model)}

        def update(model: Any = model, batch: DecodeBatch = batch, before: Any = before) -> None:
            load_published(model, moved(before, 1).items())
            if mode == "recompute":
                batch.rebuild_cache()

        found.append(run(batch, waves, update))
    assert largest_difference(found[1], found[0]) <= SAME
    assert tokens_of(found[0]) != tokens_of(run(graphed(text_model(), None), waves)), "the weights differ visibly"
    assert capture.replays > 10


def test_rows_that_are_dropped_make_room_for_others() -> None:
    """Slots in the middle come free and are taken; what was in them is not seen."""
    found: list[list[DecodeRow]] = []
    for batch in (DecodeBatch(text_model("a window"), (), CPU), graphed(text_model("a window"), RecordedCapture)):
        first, second, third, last = requests(9, 12, 30, 8, tokens=25)
        batch.join(batch.prefill([first, second, third], 0))
        for _ in range(4):
            batch.step(0)
        batch.keep(lambda row: row.request.request_id != 1)  # outside of inference mode, as where tickets are recalled
        batch.step(0)
        batch.join(batch.prefill([last], 0))
        found.append(list(batch.rows))
        while batch.rows:
            batch.step(0)
    assert largest_difference(found[1], found[0]) <= SAME


def test_numbers_of_a_broken_version_stay_where_they_were() -> None:
    """Attention multiplies what is masked by zero, and zero times NaN is NaN."""
    model, waves = text_model(), [requests(9, 3, tokens=20)]
    expected, batch = run(DecodeBatch(model, (), CPU), waves), graphed(model, RecordedCapture)
    run(batch, [requests(30, 30, 30, 30, tokens=40)])
    with torch.inference_mode():
        for tensor in batch._slots._tensors():
            tensor.memory.fill_(torch.nan)
    assert largest_difference(run(batch, waves), expected) <= SAME
    assert batch._graphs.failure == ""


def test_a_long_run_needs_no_more_memory_than_its_sequences() -> None:
    """Sequences join and leave for 160 steps, 30 columns each; a step reads few columns that none of them has."""
    found: list[list[DecodeRow]] = []
    for batch in (DecodeBatch(text_model(), (), CPU), graphed(text_model(), None)):
        rows: dict[int, DecodeRow] = {}
        for number in range(20):
            joining = replace(requests(10, tokens=20, size=2)[0], request_id=number, seed=number)
            batch.join(batch.prefill([joining], 0))
            rows |= {id(row): row for row in batch.rows}
            for _ in range(8):
                batch.step(0)
                if isinstance(batch, GraphedBatch):
                    assert batch._slots.start <= batch._attention.shape[1] // 4
                    assert batch._slots.columns <= 64
                    assert batch._slots.rows <= 8
        found.append(list(rows.values()))
    assert largest_difference(found[1], found[0]) <= SAME


def test_each_row_attends_to_something() -> None:
    """Three sequences and a slot without one; before the third prompt there is padding."""
    batch = graphed(text_model(), RecordedCapture)
    batch.join(batch.prefill([*requests(9, 20, tokens=9, size=1), *requests(3, tokens=9, size=1)], 0))
    batch.step(0)
    assert batch._tensors is not None
    seen = batch._tensors.attention[:, : batch._slots.end + 1].sum(dim=1)
    assert seen.tolist() == [10, 21, 4, 1]


def test_a_step_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replayed step looks at no value, but for the tokens at its end."""
    capture = RecordedCapture()
    batch = graphed(text_model(), lambda: capture)
    batch.join(batch.prefill(requests(9, 3, tokens=20), 0))
    for _ in range(3):
        batch.step(0)
    looks: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        plain = getattr(torch.Tensor, name)
        return lambda self, *arguments: looks.append(name) or plain(self, *arguments)

    for name in ("tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    replays = capture.replays
    assert not batch.step(0)
    assert capture.replays == replays + 1
    assert looks == ["tolist"]
