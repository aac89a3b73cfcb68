"""W&B's own process writes records that can be read back with its own format."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.trackers.test_tensorboard import recorder_of
from tests.rigs.waiting import wait_until
from tests.unit.asyncrl.test_trackers import record_steps

BLOCK = 32768


def wandb_records(file: Path) -> Iterator[Any]:
    """W&B's offline file: LevelDB's log format after a header of 7 bytes, each record a protocol buffer."""
    from wandb.proto import wandb_internal_pb2

    data, offset, whole = file.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        if BLOCK - offset % BLOCK < 7:  # a block's end has no room for a header
            offset += BLOCK - offset % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[offset + 4 : offset + 7])
        whole += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]
            record.ParseFromString(whole)
            yield record
            whole = b""


@pytest.mark.slow
def test_wandb_offline_is_one_run_with_each_step_once_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setattr("asyncrl.telemetry.tracker.CLOSE_S", 60.0)  # a busy machine
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NETRC", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("WANDB_DATA_DIR")  # is set by the tracker
    run, errors = tmp_path / "run", Counter[str]()
    recorder = recorder_of(run, "wandb", errors=errors)
    recorder.evaluation({"step": 0, "accuracy": 0.25, "rows": 16})
    record_steps(recorder, 1, 4)
    recorder.evaluation({"step": 4, "accuracy": 0.5, "rows": 16})
    recorder.close()
    resumed = recorder_of(run, "wandb", errors=errors)
    resumed.truncate_after(2, evaluations_after=4)
    record_steps(resumed, 3, 6)
    resumed.evaluation({"step": 6, "accuracy": 0.75, "rows": 16})
    resumed.close()
    assert errors == {}

    files = sorted(run.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2, "one of each process"
    for file in files:  # W&B's own process writes them
        wait_until(
            lambda file=file: [r.HasField("exit") for r in wandb_records(file)][-1:] == [True], f"the end of {file}"
        )
    histories = [
        [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item} for record in lines]
        for lines in ([r for r in wandb_records(file) if r.WhichOneof("record_type") == "history"] for file in files)
    ]
    assert [[line["step"] for line in history] for history in histories] == [[0, 1, 2, 3, 4], [5, 6]]
    assert histories[0][0]["held_out/accuracy"] == 0.25
    assert (histories[1][-1]["reward/mean"], histories[1][-1]["held_out/accuracy"]) == (0.6, 0.75)
    began = [record.run for file in files for record in wandb_records(file) if record.HasField("run")]
    assert len({each.run_id for each in began}) == 1
    assert began[0].project == "digits"
    settings = {item.key: json.loads(item.value_json) for item in began[0].config.update}
    assert settings["learner"]["max_staleness"] == 2
    (table,) = [r.artifact.manifest for r in wandb_records(files[1]) if r.HasField("artifact")][-1:]
    assert table.contents
    assert all(Path(entry.local_path).is_relative_to(run) for entry in table.contents), "it is complete in its folder"
