"""trackio, MLflow and SwanLab write to a local folder what their own readers read back."""

from __future__ import annotations

import io
import json
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.plugins.trackers.test_tensorboard import recorder_of
from tests.unit.asyncrl.test_trackers import record_steps

CURVE = [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.5), (6, 0.6)]
HELD_OUT = [(0, 0.25), (4, 0.5), (6, 0.75)]
ABSENT = "the package of this tracker is not installed: pip install 'asyncrl[trackio,mlflow,swanlab]'"


def run_with(tracker: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Two processes' worth of a run with this tracker: the second makes steps 3 and 4 again."""
    monkeypatch.setattr("asyncrl.telemetry.tracker.CLOSE_S", 60.0)  # a busy machine
    errors = Counter[str]()
    recorder = recorder_of(run, tracker, errors=errors)
    recorder.evaluation({"step": 0, "accuracy": 0.25, "rows": 16})
    record_steps(recorder, 1, 4)
    recorder.evaluation({"step": 4, "accuracy": 0.5, "rows": 16})
    recorder.close()
    resumed = recorder_of(run, tracker, errors=errors)
    resumed.truncate_after(2, evaluations_after=4)
    record_steps(resumed, 3, 6)
    resumed.evaluation({"step": 6, "accuracy": 0.75, "rows": 16})
    resumed.close()
    return errors


def assert_is_the_first_picture(file: Path) -> None:
    shown = Image.open(io.BytesIO(file.read_bytes())).convert("RGB")
    assert (shown.size, shown.getpixel((0, 0))) == ((512, 256), (255, 0, 0)), "large pictures are made smaller"


def test_trackio_has_one_run_with_each_step_once_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason=ABSENT)
    for name in ("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads its folder as it is imported
    run = tmp_path / "runs" / "digits"
    assert run_with("trackio", run, monkeypatch) == {}

    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]
    from trackio.utils import MEDIA_DIR  # pyright: ignore[reportMissingImports]

    assert run / "trackio" / "media" == MEDIA_DIR
    (found,) = SQLiteStorage.get_run_records("asyncrl")
    name = str(found["name"])
    assert name == f"digits-{(run / 'trackio-name').read_text()}"
    lines = SQLiteStorage.get_logs("asyncrl", name)
    assert [(line["step"], line["reward/mean"]) for line in lines if "reward/mean" in line] == CURVE
    assert [(line["step"], line["held_out/accuracy"]) for line in lines if "held_out/accuracy" in line] == HELD_OUT
    settings = SQLiteStorage.get_run_config("asyncrl", name)
    assert settings is not None
    assert settings["learner"]["max_staleness"] == 2
    tables: list[Any] = [(line["step"], line["samples"]["_value"]) for line in lines if "samples" in line]
    assert [step for step, _ in tables] == [1, 2, 3, 4, 5, 6]
    row = tables[0][1][0]
    assert (row["completion"], row["reward"], row["status"], row["answer"]) == ("it | is `1`", 1.0, "finished", "7")
    assert_is_the_first_picture(MEDIA_DIR / row["image"]["file_path"])


def test_mlflow_has_one_run_with_each_step_once_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason=ABSENT)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "mlflow").mkdir()  # by a process that was ended in the middle of it
    with closing(sqlite3.connect(tmp_path / "mlflow" / "mlflow.db")) as half_made:
        half_made.execute("CREATE TABLE entity_associations (association_id VARCHAR(36))")
    assert run_with("mlflow", tmp_path, monkeypatch) == {}

    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("asyncrl")
    assert experiment
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", str(tmp_path))
    assert run.data.params == {
        "learner.optim.lr": "0.0001",
        "learner.max_staleness": "2",
        "data.train_files": "['a.parquet']",
    }
    number = run.info.run_id
    assert [(one.step, one.value) for one in client.get_metric_history(number, "reward/mean")] == CURVE
    assert [(one.step, one.value) for one in client.get_metric_history(number, "held_out/accuracy")] == HELD_OUT
    stored = tmp_path / "mlflow" / "artifacts" / number / "artifacts"
    assert "max_staleness: 2" in (stored / "config.yaml").read_text()
    assert [file.name for file in sorted((stored / "samples").iterdir())] == [
        f"step-00000{n}.json" for n in range(1, 7)
    ]
    assert "step-000006.json" in run.data.tags["mlflow.loggedArtifacts"], "it is shown as a table"
    assert mlflow_rows(stored, 2) == [
        [2, "rl:1", "which?", "7", "it | is `2`", 1.0, "finished"],
        [2, "rl:1", "which?", "7", "", None, None],
    ]
    pictures = sorted((stored / "images").glob("samples~0~0+step+*.png"))
    assert [file.name.split("+")[2] for file in pictures] == ["1", "2", "3", "4", "5", "6"]
    assert_is_the_first_picture(pictures[0])


def mlflow_rows(stored: Path, step: int) -> list[list[Any]]:
    table = json.loads((stored / "samples" / f"step-{step:06d}.json").read_text())
    assert table["columns"] == ["step", "row", "prompt", "answer", "completion", "reward", "status"]
    return table["data"]


def test_mlflow_has_later_samples_as_files_of_the_same_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason=ABSENT)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("asyncrl.telemetry.tracker.CLOSE_S", 60.0)
    errors = Counter[str]()
    recorder = recorder_of(tmp_path, "mlflow", errors=errors)
    record_steps(recorder, 1999, 2001)
    recorder.close()
    assert errors == {}
    (stored,) = (tmp_path / "mlflow" / "artifacts").glob("*/artifacts")
    assert [[row[0] for row in mlflow_rows(stored, step)] for step in (2000, 2001)] == [[2000] * 2, [2001] * 2]


def test_mlflow_takes_metrics_whose_names_it_would_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason=ABSENT)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("asyncrl.telemetry.tracker.CLOSE_S", 60.0)
    errors = Counter[str]()
    recorder = recorder_of(tmp_path, "mlflow", errors=errors)
    recorder.step({"step": 1, "reward/right (all)": 1.0})
    recorder.close()
    assert errors == {}

    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    history = client.get_metric_history((tmp_path / "mlflow-id").read_text(), "reward/right _all_")
    assert [one.value for one in history] == [1.0]


def test_an_mlflow_server_that_is_not_there_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow", reason=ABSENT)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert run_with("mlflow", tmp_path, monkeypatch) == {"tracker_mlflow": 2}, "once for each process"
    assert "mlflow lost some data; the run continues: it could not be opened" in caplog.text
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6


def test_swanlab_offline_has_each_step_once_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab", reason=ABSENT)
    for name in ("SWANLAB_MODE", "SWANLAB_API_KEY", "SWANLAB_LOG_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    assert run_with("swanlab", run, monkeypatch) == {}
    files = sorted(run.glob("swanlab/run-*/run-*.swanlab"))
    assert len(files) == 2, "one of each process"
    assert len({file.name for file in files}) == 1, "of one run"
    scalars = [value for file in files for value in swanlab_scalars(file)]
    assert [(step, value) for key, step, value in scalars if key == "reward/mean"] == CURVE
    assert [(step, value) for key, step, value in scalars if key == "held_out/accuracy"] == HELD_OUT
    assert "max_staleness" in (files[0].parent / "files" / "config.yaml").read_text()
    tables = sorted(run.glob("swanlab/run-*/media/echarts/*.json"))
    assert [table.name[:3] for table in tables] == ["001", "002", "003", "004", "005", "006"]
    row = json.loads(tables[0].read_text())["rowData"][0]
    assert (row["completion"], row["reward"], row["status"]) == ("it | is `1`", 1.0, "finished")
    pictures = sorted(run.glob("swanlab/run-*/media/image/001-*.png"))
    assert len(pictures) == 2
    assert_is_the_first_picture(next(file for file in pictures if Image.open(file).getpixel((0, 0)) == (255, 0, 0)))
    about = (files[0].parent / "files" / "swanlab-metadata.json").read_text()
    assert sys.argv[0] not in about, "a command line may hold secrets"


def swanlab_scalars(file: Path) -> list[tuple[str, int, float]]:
    """Name, step and value of each number in SwanLab's own file."""
    from swanlab.proto.swanlab.record.v1 import record_pb2  # pyright: ignore[reportMissingImports]
    from swanlab.sdk.internal.core_python.store import DataStoreReader  # pyright: ignore[reportMissingImports]

    reader, found = DataStoreReader(), []
    reader.open(file)
    for line in reader:
        record = record_pb2.Record()
        record.ParseFromString(line)
        if record.HasField("scalar"):
            found.append((record.scalar.key, record.scalar.step, record.scalar.value.number))
    return found
