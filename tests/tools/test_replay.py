"""`asyncrl replay`: the steps of a run come out again as they were, and what is not the same is found."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.journal.reader import JournalReader
from asyncrl.journal.segments import Segments, pack_frames
from asyncrl.journal.writer import JOURNAL_FILE
from asyncrl.tools.step_comparison import Comparison, Difference, compare_numbers, compare_weights
from learner import replay
from learner.replay import spans
from learner.training.engines.torch_engine import TorchEngine
from protocol.codec import encode
from tests.rigs.small_runs import logs
from tests.rigs.two_processes import run_both
from tests.system.test_end_to_end import lines

STEPS = 5
KINDS: dict[str, dict[str, Any]] = {
    "whole model, adaptive staleness": {
        "learner": {
            "cpu_threads": 2,
            "max_staleness": "auto",
            "adaptive_staleness": {"max": 3, "patience": 1, "kl_low": 1, "kl_high": 2},
        },
        "algorithm": {"updates_per_batch": 2},
    },
    "adapter": {
        "model": {"lora": {"rank": 4}, "freeze_vision_tower": True},
        "learner": {"max_staleness": 1},
        "algorithm": {"kl_loss_coef": 1e-2},
    },
}


def of_the_whole_model(test: Any) -> Any:
    return pytest.mark.slow(pytest.mark.parametrize("run", list(KINDS)[:1], indirect=True)(test))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs by their kind, so that each is made once."""
    return {"folder": tmp_path_factory.mktemp("finished")}


@pytest.fixture(params=KINDS)
def run(
    request: pytest.FixtureRequest, make_config: Callable[..., RunConfig], finished: dict[str, Path]
) -> Iterator[Path]:
    """Five steps with checkpoints of the fourth and the last."""
    threads = torch.get_num_threads()
    if request.param not in finished:
        folder = finished["folder"] / request.param.split(maxsplit=1)[0]
        sections = KINDS[request.param]
        config = make_config(
            **sections,
            data={"val_files": []},
            trainer={"max_steps": STEPS, "samples_per_step": 0, "save_freq": 2},
        )
        config = config.model_copy(update={"run_dir": str(folder)})
        assert run_both(config, folder) == (0, 0), logs(folder)
        finished[request.param] = folder
    yield finished[request.param]
    torch.set_num_threads(threads)


def content(folder: Path) -> dict[str, tuple[int, str]]:
    """Time and hash of every file."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(f): (f.stat().st_mtime_ns, hashlib.sha256(f.read_bytes()).hexdigest()) for f in files}


@pytest.mark.slow
def test_every_step_is_the_same_bit_for_bit_and_the_run_is_not_touched(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(run)
    for step, beginning in ((3, "the initial model"), (4, "the initial model"), (5, "the checkpoint of step 4")):
        assert replay.main([str(run), "--step", str(step)]) == 0, capsys.readouterr().out
        said = capsys.readouterr().out
        assert f"from {beginning}" in said
        assert "none differ" in said or step == 5
        assert "differs" not in said
        assert ("tensors are equal, bit for bit" in said) == (step in (4, 5)), "where there is a checkpoint"
        for name in ("loss", "grad_norm", "ess", "reward/mean", "staleness/bound"):
            assert f"\n{name} " in said
    assert content(run) == before


@of_the_whole_model
def test_a_difference_of_a_setting_is_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(run), "--step", "4", "learner.optim.lr=0.002"]) == 1
    said = capsys.readouterr().out
    assert "steps between: 1 to 3; 1 to 3 differ" in said
    (loss,) = [line for line in said.splitlines() if line.startswith("loss ")]
    assert loss.endswith("differs")
    assert "largest difference" in said


@of_the_whole_model
def test_a_difference_of_a_recorded_number_is_found(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    records = lines(run / "metrics.jsonl")
    records[2]["grad_norm"] = float(np.nextafter(records[2]["grad_norm"], 9))
    records[2]["reference_kl_of_old"] = 1.0
    (copy / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert replay.main([str(copy), "--step", "3"]) == 1
    differing = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith("differs")]
    assert differing == ["grad_norm", "reference_kl_of_old"]


@of_the_whole_model
def test_a_difference_of_a_journaled_group_is_found(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    journal = copy / JOURNAL_FILE
    with closing(JournalReader(journal)) as reader:
        group = reader.group(reader.consumed(2)[0].ticket_id)
    changed = group.model_copy(update={"logprobs": group.logprobs - np.float32(1e-3)})
    segments = Segments(None)
    (place,) = segments.append([pack_frames(encode(changed))])
    payload = b"".join(pack_frames(encode(changed)))
    segments.close()
    (copy / f"{JOURNAL_FILE}.groups-000099").write_bytes(payload)
    with closing(sqlite3.connect(journal)) as db, db:
        values = (99, 0, place.length, place.checksum, group.ticket_id)
        db.execute("UPDATE groups SET segment = ?, offset = ?, length = ?, checksum = ? WHERE ticket_id = ?", values)
    assert replay.main([str(copy), "--step", "1"]) == 0
    assert replay.main([str(copy), "--step", "3"]) == 1
    assert "steps between: 1 to 2; 2 differ" in capsys.readouterr().out


@of_the_whole_model
def test_a_difference_of_a_weight_is_found(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints" / "step-000005")
    shutil.copytree(copy / "checkpoints" / "step-000004", copy / "checkpoints" / "step-000005")
    assert replay.main([str(copy), "--step", "5"]) == 1
    said = capsys.readouterr().out
    assert "largest difference" in said
    assert not [line for line in said.splitlines() if line.startswith("loss ") and line.endswith("differs")]


@of_the_whole_model
def test_another_initial_model_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = run / "checkpoints" / "step-000004" / "model"
    assert replay.main([str(run), "--step", "1", f"model.path={other}"]) == 2
    assert "began with another model" in capsys.readouterr().err


@of_the_whole_model
@pytest.mark.parametrize(
    ("override", "was"),
    [("batch.prompts_per_step=2", "4"), ("batch.group_size=2", "4"), ("trainer.seed=99", "")],
)
def test_a_setting_that_the_recorded_step_was_made_with_is_refused_by_name(
    run: Path, capsys: pytest.CaptureFixture[str], override: str, was: str
) -> None:
    assert replay.main([str(run), "--step", "3", override]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: {override} cannot be tried on a step of the journal")
    assert f"sampled with {was}" in said
    if was:
        name = override.partition("=")[0]
        assert replay.main([str(run), "--step", "1", f"{name}={was}"]) == 0, "the same value is no other"


@of_the_whole_model
def test_what_is_not_there_is_refused_with_what_is(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    assert replay.main([str(copy), "--step", "6"]) == 2
    assert "it has trained 5 steps. These can be made again: 1 to 5" in capsys.readouterr().err
    with closing(sqlite3.connect(copy / JOURNAL_FILE)) as db, db:
        db.execute("DELETE FROM groups WHERE ticket_id IN (SELECT ticket_id FROM consumption WHERE step = 2)")
    assert replay.main([str(copy), "--step", "3"]) == 2
    said = capsys.readouterr().err
    assert "it would begin at the initial model, and the groups of steps 2 are not kept any more" in said
    assert "These can be made again: 1, 5" in said
    assert replay.main([str(tmp_path), "--step", "3"]) == 2
    assert "there is no journal.sqlite" in capsys.readouterr().err


def test_on_a_gpu_small_differences_are_told_and_accepted() -> None:
    numbers = compare_numbers({"loss": 0.5, "ess": 1.0, "time": 1.0}, {"loss": 0.5001, "ess": 1.0})
    assert [number.name for number in numbers] == ["loss", "ess"]
    assert not Comparison(1, "cpu", "float32", numbers).is_equal
    on_gpu = Comparison(1, "cuda", "float32", numbers)
    assert on_gpu.is_equal
    assert "within tolerance" in on_gpu.table()
    assert not Comparison(1, "cuda", "float32", compare_numbers({"loss": 0.5}, {"loss": 0.51})).is_equal


def test_numbers_that_are_not_finite_are_compared_as_they_are_recorded() -> None:
    numbers = compare_numbers({"ess": None, "loss": None}, {"ess": float("nan"), "loss": 1.0, "new": 2.0})
    assert [number.size for number in numbers] == [0.0, float("inf"), float("inf")]


def test_tensors_that_are_missing_or_of_another_type_differ() -> None:
    one = torch.ones(2)
    differing = compare_weights({"a": one, "b": one, "d": one}, {"a": one.clone(), "b": one.bfloat16(), "c": one})
    assert {d.name: d.size for d in differing} == {"a": 0.0, "b": float("inf"), "c": float("inf"), "d": float("inf")}
    (nan,) = compare_weights({"a": one}, {"a": one * float("nan")})
    assert nan.size > 0


def _compared(recorded: torch.Tensor, again: torch.Tensor, device: str = "cpu") -> tuple[Any, bool]:
    (found,) = compare_weights({"w": recorded}, {"w": again})
    return found, Comparison(1, device, "float32", ()).with_weights((found,)).is_equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_unit_in_the_last_place_of_one_weight_is_found(dtype: torch.dtype) -> None:
    weights = torch.linspace(-1, 1, 10_000).to(dtype).reshape(100, 100)
    again = weights.clone()
    assert _compared(weights, again) == (Difference("w", None, None, 0.0, 0.0), True)
    bits = again.view(torch.int32 if dtype == torch.float32 else torch.int16)
    bits[99, 99] += 1
    found, is_equal = _compared(weights, again)
    assert not is_equal
    assert found.size == torch.finfo(dtype).eps


def test_weights_are_compared_by_their_bits() -> None:
    """Not as numbers: NaN would differ from itself, and -0.0 be 0.0."""
    nan, zero = torch.tensor([float("nan"), 1.0]), torch.tensor([0.0, 1.0])
    assert _compared(nan, nan.clone()) == (Difference("w", None, None, 0.0, 0.0), True)
    found, is_equal = _compared(zero, torch.tensor([-0.0, 1.0]))
    assert (found.size, found.relative, is_equal) == (math.ulp(0.0), math.ulp(0.0), False)
    assert _compared(zero, torch.tensor([-0.0, 1.0]), "cuda")[1], "within any tolerance"
    found, is_equal = _compared(nan, zero, "cuda")
    assert (found.size, is_equal) == (math.inf, False), "a NaN that came or went is no small difference"
    found, _ = _compared(nan, torch.tensor([float("nan"), 1.5]))
    assert found.size == 0.5, "beside equal NaNs"
    infinite = torch.tensor([math.inf, 1.0])
    assert _compared(infinite, infinite.clone())[1]
    found, is_equal = _compared(infinite, torch.tensor([math.inf, 1.5]), "cuda")
    assert (found.size, is_equal) == (0.5, False), "beside equal infinities"
    assert not _compared(infinite, zero, "cuda")[1]
    assert _compared(torch.tensor(2.0), torch.tensor(2.0))[1], "of no dimension"


def test_spans() -> None:
    assert spans([]) == ""
    assert spans([3]) == "3"
    assert spans([1, 2, 3, 5, 7, 8]) == "1 to 3, 5, 7 to 8"


@pytest.mark.parametrize("before", [True, False])
def test_a_step_leaves_the_settings_of_torch_as_they_were(make_config: Callable[..., RunConfig], before: bool) -> None:
    filling: Any = torch.utils.deterministic
    seen: list[tuple[bool, bool]] = []

    def settings() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory

    number = torch.ones((), requires_grad=True)
    number.register_hook(lambda _: seen.append(settings()))
    config = make_config()
    kept = settings()
    try:
        torch.use_deterministic_algorithms(before)
        filling.fill_uninitialized_memory = before
        TorchEngine(config, config.learner.optim, 1).backward(number * 2)
        assert settings() == (before, before)
    finally:
        torch.use_deterministic_algorithms(kept[0])
        filling.fill_uninitialized_memory = kept[1]
    assert seen == [(True, False)]
