"""Steps are captured, compared, replayed, and computed by Python where they cannot be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch

from asyncrl_plugins.cuda_graphs.graphs import CudaCapture, StepGraphs, Work
from asyncrl_plugins.cuda_graphs.slots import SlotLayer, rounded_columns, rounded_rows
from rollout_server.engines.hf.decode_batch import DecodeBatch
from tests.plugins.cuda_graphs.recorded_steps import RecordedCapture
from tests.plugins.cuda_graphs.small_models import graphed, requests, run, text_model, tokens_of
from tests.rigs.policies import CPU


@pytest.mark.parametrize(
    ("rows", "most", "rounded"),
    [(1, 256, 1), (3, 256, 4), (9, 256, 16), (17, 256, 24), (25, 256, 32), (97, 256, 128), (129, 150, 150), (7, 5, 7)],
)
def test_rows_are_rounded_up(rows: int, most: int, rounded: int) -> None:
    assert rounded_rows(rows, most) == rounded


@pytest.mark.parametrize(
    ("columns", "most", "rounded"),
    [(1, 4096, 32), (33, 4096, 64), (300, 4096, 320), (513, 4096, 576), (1025, 4096, 1152), (1025, 1056, 1056)],
)
def test_columns_are_rounded_up(columns: int, most: int, rounded: int) -> None:
    assert rounded_columns(columns, most) == rounded


class Doubling:
    """Work on one number, which says how often Python did it."""

    def __init__(self):
        self.calls = 0
        self.given, self._result = torch.zeros(1), torch.zeros(1)

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        return self._result.copy_(self.given * 2)

    def step(self, graphs: StepGraphs, shape: tuple[int, int], number: float) -> float:
        self.given.fill_(number)
        return float(graphs.run(shape, self))


def test_the_first_step_of_a_shape_is_captured_the_second_compared_and_others_replayed() -> None:
    work, capture = Doubling(), RecordedCapture()
    graphs = StepGraphs(lambda: capture)
    calls = []
    for number in range(1, 6):
        assert work.step(graphs, (1, 32), number) == 2 * number
        calls.append(work.calls)
    assert calls == [2, 3, 3, 3, 3], "to compute and to capture; to compare"
    assert (capture.captures, capture.replays) == (1, 4)


def test_the_graph_that_was_not_used_for_longest_leaves() -> None:
    work, capture = Doubling(), RecordedCapture()
    graphs = StepGraphs(lambda: capture, most=2)
    for shape in ((1, 32), (2, 32), (1, 32), (4, 32), (1, 32)):
        work.step(graphs, shape, 1)
    assert capture.captures == 3
    work.step(graphs, (2, 32), 1)
    assert capture.captures == 4


def test_a_new_pool_is_taken_where_all_graphs_were_dropped() -> None:
    work, pools = Doubling(), list[RecordedCapture]()

    def make() -> RecordedCapture:
        pools.append(RecordedCapture())
        return pools[-1]

    graphs = StepGraphs(make)
    for _ in range(2):
        work.step(graphs, (1, 32), 1)
        graphs.drop()
    assert [pool.captures for pool in pools] == [1, 1]


def refusing(work: Work) -> Callable[[], None]:
    work()
    raise RuntimeError("operation not permitted\nwhen stream is capturing")


def looked_at(model: Any, _: Any) -> None:
    float(model.model.norm.weight[0])


@pytest.mark.parametrize("fault", ["no capture", "a look at a value"])
def test_a_capture_that_fails_is_said_once_and_decoding_goes_on(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    waves = [requests(9, 3, tokens=20)]
    model = text_model()
    expected = run(DecodeBatch(model, (), CPU), waves)
    if fault == "a look at a value":
        model.register_forward_pre_hook(looked_at)
    batch = graphed(model, RecordedCapture if fault == "a look at a value" else lambda: refusing)
    assert tokens_of(run(batch, waves)) == tokens_of(expected)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1
    assert said[0].startswith(
        "the hf engine goes on without CUDA graphs: a capture failed (RuntimeError: operation not permitted when stream"
    )


def test_numbers_that_python_took_down_are_found_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A cache that writes at a column of Python's would write there again and again."""
    waves = [requests(9, 3, tokens=20)]
    expected = run(DecodeBatch(text_model(), (), CPU), waves)

    def update(self: SlotLayer, *states: torch.Tensor, **_: Any) -> Any:
        part = self._layout.part
        if part is None:
            return plain(self, *states)
        views = [tensor.memory[: part.rows, :, : part.columns] for tensor in self.tensors]
        for view, written in zip(views, states, strict=False):
            view[:, :, self._layout.end] = written[:, :, 0]
        return views

    plain = SlotLayer.update
    monkeypatch.setattr(SlotLayer, "update", update)
    batch = graphed(text_model(), RecordedCapture)
    assert tokens_of(run(batch, waves)) == tokens_of(expected)
    assert "logits of a replay differ by" in caplog.text


def test_a_step_that_fails_is_no_fault_of_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is full, perhaps: the engine begins its tickets anew, one by one."""
    batch = graphed(text_model(), RecordedCapture)
    batch.join(batch.prefill(requests(9, tokens=20), 0))
    with monkeypatch.context() as patch:
        patch.setattr(batch.model, "forward", lambda **_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            batch.step(0)
    assert batch._graphs.failure == ""


def test_graphs_go_with_the_addresses_of_the_memory() -> None:
    """Longer sequences need more of it; those that ended leave it as it is."""
    capture = RecordedCapture()
    batch = graphed(text_model(), lambda: capture)
    run(batch, [requests(9, tokens=20)])
    before, captures = [tensor.memory.data_ptr() for tensor in batch._slots._tensors()], capture.captures
    run(batch, [requests(9, tokens=20)])
    assert [tensor.memory.data_ptr() for tensor in batch._slots._tensors()] == before
    assert capture.captures == captures, "all shapes were there"
    run(batch, [requests(80, tokens=20)])
    assert [tensor.memory.data_ptr() for tensor in batch._slots._tensors()] != before
    run(batch, [requests(9, tokens=20)])
    assert capture.captures > captures + 1, "the first ones were dropped"


class FakeGraph:
    """Stand-in for torch.cuda.CUDAGraph, which says what was asked of it."""

    asked: ClassVar[list[Any]] = []

    def capture_begin(self, **options: Any) -> None:
        self.asked.append(options)

    def capture_end(self) -> None:
        self.asked.append("end")
        if "invalid" in self.asked:
            raise RuntimeError("the capture is not valid any more")

    def replay(self) -> None:
        self.asked.append("replay")


def test_captures_share_a_pool_and_end_where_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that went on capturing would take down all that comes after."""
    for name, stand_in in {
        "CUDAGraph": FakeGraph,
        "Stream": lambda device: "side",
        "device": nullcontext,
        "stream": nullcontext,
        "graph_pool_handle": lambda: (0, 7),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(FakeGraph, "asked", [])
    options = {"pool": (0, 7), "capture_error_mode": "thread_local"}
    capture = CudaCapture(torch.device("cuda:1"))
    capture(lambda: torch.zeros(1))()
    assert FakeGraph.asked == [options, "end", "replay"]

    def fail() -> torch.Tensor:
        FakeGraph.asked.append("invalid")
        raise RuntimeError("operation not permitted")

    with pytest.raises(RuntimeError, match="operation not permitted"):
        capture(fail)
    assert FakeGraph.asked[3:] == [options, "invalid", "end"]
