"""Calls of trackio, MLflow and SwanLab as their packages take them, recorded from trackio 0.43, MLflow 3.17 and
SwanLab 0.10.3. The adapters run against the record everywhere; where a package is installed, the record is compared."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.plugins.trackers.test_local_trackers import ABSENT, run_with

SURFACES: dict[str, dict[str, Callable[..., Any]]] = {
    "trackio": {
        "init": lambda project, name=None, config=None, resume=None, embed=None, auto_log_gpu=None, auto_log_cpu=None: (
            0
        ),
        "Image": lambda value, caption=None: 0,
        "Table": lambda columns=None, data=None: 0,
        "Run.log": lambda self, metrics, step=None: 0,
        "Run.finish": lambda self: 0,
    },
    "mlflow": {
        "MlflowClient": lambda tracking_uri=None: 0,
        "entities.Metric": lambda key, value, timestamp, step: 0,
        "entities.Param": lambda key, value: 0,
        "MlflowClient.get_experiment_by_name": lambda self, name: 0,
        "MlflowClient.create_experiment": lambda self, name, artifact_location=None: 0,
        "MlflowClient.create_run": lambda self, experiment_id, run_name=None: 0,
        "MlflowClient.update_run": lambda self, run_id, status=None: 0,
        "MlflowClient.log_text": lambda self, run_id, text, artifact_file: 0,
        "MlflowClient.log_batch": lambda self, run_id, metrics=None, params=None: 0,
        "MlflowClient.log_table": lambda self, run_id, data, artifact_file: 0,
        "MlflowClient.log_image": lambda self, run_id, image, key=None, step=None: 0,
        "MlflowClient.set_terminated": lambda self, run_id: 0,
    },
    "swanlab": {
        "init": lambda *, project=None, name=None, id=None, resume=None, mode=None, config=None, settings=None: 0,
        "Settings": lambda *, interactive=None, terminal=None, probe=None: 0,
        "Image": lambda data_or_path, caption=None: 0,
        "echarts.Table": lambda: 0,
        "echarts.Table.add": lambda self, headers, rows: 0,
        "Run.log": lambda self, data, step=None: 0,
        "Run.finish": lambda self: 0,
    },
}
"""Parameters that the adapters may give, by the place in the package."""
STEPS = [1, 2, 3, 4, 5, 6]


class StandIn:
    """A package that takes the recorded calls, refuses others with a TypeError, and keeps them."""

    def __init__(self, package: str, returns: Mapping[str, Any]):
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._surface, self._returns = SURFACES[package], returns
        self.modules = {package: ModuleType(package)}
        for place in self._surface:
            *above, name = place.split(".")
            if above and above[0] in ("entities", "echarts"):
                inner = self.modules.setdefault(f"{package}.{above[0]}", ModuleType(above[0]))
                setattr(self.modules[package], above[0], inner)
                if len(above) == 1:
                    setattr(inner, name, self._called(place))
            elif not above:
                setattr(self.modules[package], name, self._called(place))

    def _called(self, place: str) -> Callable[..., Any]:
        def call(*positional: Any, **named: Any) -> Any:
            bound = inspect.signature(self._surface[place]).bind(*positional, **named)
            self.calls.append((place, dict(bound.arguments)))
            return self._returns[place] if place in self._returns else self._object("Run" if place == "init" else place)

        return call

    def _object(self, cls: str) -> Any:
        made = SimpleNamespace()
        for place in self._surface:
            if place.startswith(f"{cls}.") and place.removeprefix(f"{cls}.").isidentifier():
                setattr(made, place.rpartition(".")[2], self._method(place, made))
        return made

    def _method(self, place: str, made: Any) -> Callable[..., Any]:
        return lambda *positional, **named: self._called(place)(made, *positional, **named)

    def all(self, place: str, argument: str) -> list[Any]:
        """Values of an argument over all calls of a place."""
        return [arguments.get(argument) for called, arguments in self.calls if called == place]


def record(
    package: str, returns: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[StandIn, Counter[str]]:
    stand_in = StandIn(package, returns)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in stand_in.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, f"asyncrl_plugins.trackers.{package}_runs", raising=False)
    for name in ("TRACKIO_DIR", "MLFLOW_TRACKING_URI", "SWANLAB_LOG_DIR"):
        monkeypatch.setenv(name, "x")  # what the adapters set goes with the test
        monkeypatch.delenv(name)
    errors = run_with(package, tmp_path / "run", monkeypatch)
    monkeypatch.delitem(sys.modules, f"asyncrl_plugins.trackers.{package}_runs")
    return stand_in, errors


def steps_of(logged: list[tuple[Any, Any]], name: str) -> list[tuple[int, Any]]:
    return [(step, values[name]) for values, step in logged if name in values]


def test_trackio_is_called_as_it_takes_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackio, errors = record("trackio", {}, tmp_path, monkeypatch)
    assert errors == {}
    assert [each["resume"] for place, each in trackio.calls if place == "init"] == ["allow", "allow"]
    assert len(set(trackio.all("init", "name"))) == 1, "one run over a resume"
    logged = list(zip(trackio.all("Run.log", "metrics"), trackio.all("Run.log", "step"), strict=True))
    assert [step for step, _ in steps_of(logged, "reward/mean")] == STEPS
    assert [step for step, _ in steps_of(logged, "samples")] == STEPS
    assert steps_of(logged, "held_out/accuracy") == [(0, 0.25), (4, 0.5), (6, 0.75)]
    assert trackio.calls[-1][0] == "Run.finish"


def test_mlflow_is_called_as_it_takes_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    returns = {"get_experiment_by_name": None, "create_experiment": "7", "create_run": run}
    returns = {f"MlflowClient.{name}": value for name, value in returns.items()}
    mlflow, errors = record("mlflow", returns, tmp_path, monkeypatch)
    assert errors == {}
    assert mlflow.all("MlflowClient.create_run", "run_name") == [str(tmp_path / "run")], "one run over a resume"
    assert set(mlflow.all("MlflowClient.log_batch", "run_id")) == {"r1"}
    assert mlflow.all("entities.Param", "key") == ["learner.optim.lr", "learner.max_staleness", "data.train_files"]
    named = [each for place, each in mlflow.calls if place == "entities.Metric"]
    assert [(each["step"], each["value"]) for each in named if each["key"] == "held_out/accuracy"] == [
        *((0, 0.25), (4, 0.5), (6, 0.75))
    ]
    assert [each["step"] for each in named if each["key"] == "reward/mean"] == STEPS
    assert len(mlflow.all("MlflowClient.log_table", "data")) == 6
    assert mlflow.all("MlflowClient.log_image", "key")[:2] == ["samples/0/0", "samples/0/1"]
    assert mlflow.calls[-1][0] == "MlflowClient.set_terminated"


def test_swanlab_is_called_as_it_takes_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SimpleNamespace(api_key=None, mode="online", model_fields_set=set())
    swanlab, errors = record("swanlab", {"Settings": settings}, tmp_path, monkeypatch)
    assert errors == {}
    assert swanlab.all("init", "mode") == ["offline", "offline"], "there is no key"
    assert len(set(swanlab.all("init", "id"))) == 1, "one run over a resume"
    logged = list(zip(swanlab.all("Run.log", "data"), swanlab.all("Run.log", "step"), strict=True))
    assert [step for step, _ in steps_of(logged, "reward/mean")] == STEPS
    assert [len(pictures) for _, pictures in steps_of(logged, "sample_images")] == [2] * 6
    assert steps_of(logged, "held_out/accuracy") == [(0, 0.25), (4, 0.5), (6, 0.75)]
    assert swanlab.calls[-1][0] == "Run.finish"


@pytest.mark.parametrize("package", SURFACES)
def test_the_record_is_what_the_installed_package_takes(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = pytest.importorskip(package, reason=ABSENT)
    for place, recorded in SURFACES[package].items():
        *above, _ = place.split(".")
        if above and above[0] == "entities":
            importlib.import_module(f"{package}.entities")
        called = installed
        for name in place.split("."):
            called = getattr(called, name)
        real, ours = inspect.signature(called).parameters, inspect.signature(recorded).parameters
        assert set(ours) <= set(real), place
        must = {name for name, each in real.items() if each.default is each.empty and each.kind < each.VAR_KEYWORD}
        assert must <= {name for name, each in ours.items() if each.default is each.empty} | {"args"}, place
        positional = [name for name, each in ours.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
        needed = [name for name in positional if ours[name].default is inspect.Parameter.empty]
        assert list(real)[: len(needed)] == needed, f"{place}: another order"
