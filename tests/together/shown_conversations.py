"""Conversations of a run as `asyncrl inspect` shows them: the system tests of the core call these on their runs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from asyncrl_plugins.viewer.inspect.__main__ import main as inspect_main
from asyncrl_plugins.viewer.inspect.records import detail_record
from asyncrl_plugins.viewer.samples.model import SampleDetail, SampleImage, SampleQuery
from asyncrl_plugins.viewer.samples.store import SampleStore
from protocol.messages import Group


def check_shown(run: Path, group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    """`asyncrl inspect` has each turn, what followed it, and the images at their places."""
    with closing(SampleStore(run)) as store:
        check_detail(store.detail(group.ticket_id), group)
    check_printed(run, group.ticket_id, capsys)


def check_detail(detail: SampleDetail, group: Group) -> None:
    assert [len(message.parts) for message in detail.opening] == [2]
    blobs = {digest: bytes(data) for digest, data in group.blobs.items()}
    for one, record in zip(detail.trajectories, group.trajectories, strict=True):
        assert [(turn.start, turn.end, turn.reward) for turn in one.turns] == [
            (turn.start, turn.end, 0.25) for turn in record.turns
        ]
        for turn in one.turns[:-1]:
            ((text, image),) = (message.parts for message in turn.shown)
            assert text == "8 signs"
            assert isinstance(image, SampleImage)
            assert image.data == blobs[image.hash]
        assert not one.turns[-1].shown
    told = detail_record(detail)["trajectories"][0]["turns"][0]
    assert told["versions"] == [0]
    assert told["shown"][0]["parts"][1]["width"] == 42
    assert len(detail.all_images) == len(detail.images) + 1 + 2 * len(detail.trajectories)


def check_printed(run: Path, ticket_id: int, capsys: pytest.CaptureFixture[str]) -> None:
    """In the terminal, too: turns in their order, each with what followed, and lists by how trajectories ended."""
    capsys.readouterr()
    assert inspect_main([str(run), "--ticket", f"{ticket_id}.0"]) == 0
    said = capsys.readouterr().out
    places = [said.index(part) for part in ("turn 0", "8 signs", "turn 1", "turn 2")]
    assert places == sorted(places), said
    assert "42" in said[places[1] : places[2]], "the size of the picture that followed"
    for end, count in (("done", 4), ("turns", 0)):
        assert inspect_main([str(run), "--json", "--limit", "4", "--end", end]) == 0
        assert len(capsys.readouterr().out.splitlines()) == count


def check_segments(run: Path, groups: list[Group], capsys: pytest.CaptureFixture[str]) -> None:
    """`asyncrl inspect` says where a segment begins, and shows what it begins with."""
    group, index = next((g, i) for g in groups for i, r in enumerate(g.trajectories) if len(r.segment_starts) > 1)
    turns = group.trajectories[index].turns
    with closing(SampleStore(run)) as store:
        told = detail_record(store.detail(group.ticket_id))["trajectories"][index]["turns"]
    assert [turn["context"] for turn in told] == [turn.context for turn in turns]
    capsys.readouterr()
    assert inspect_main([str(run), "--ticket", f"{group.ticket_id}.{index}"]) == 0
    said = capsys.readouterr().out
    number, first = next((n, turn) for n, turn in enumerate(turns) if turn.context)
    assert (
        said.index(f"turn {number - 1}")
        < said.index(f"{first.context} tokens of history")
        < said.index(f"turn {number}")
    )


def check_quantization(run: Path, kind: str) -> None:
    """A sample names the weights that it was sampled with."""
    with closing(SampleStore(run)) as store:
        (row, *_) = store.find(SampleQuery()).rows
        assert store.detail(row.ticket_id).quantization == kind
