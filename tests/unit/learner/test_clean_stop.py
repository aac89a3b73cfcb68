"""Signals of a clean stop: the first is heard between two steps, and nothing after it outlasts the grace."""

from __future__ import annotations

import logging
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from learner.loop.clean_stop import CleanStop, StopAsked
from learner.loop.step_schedule import StepSchedule

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_the_first_signal_ends_nothing_by_itself_and_a_second_one_all(first: int, second: int) -> None:
    stop = CleanStop(30.0)
    before = [signal.getsignal(number) for number in SIGNALS]
    with stop.listening():
        stop.check()
        signal.raise_signal(first)  # in the middle of a step: it goes on
        with pytest.raises(StopAsked):
            stop.check()
        stop.check()  # what the stop itself waits for is not broken off
        assert not stop.hurries
        with pytest.raises(KeyboardInterrupt) as at_once:
            signal.raise_signal(second)
        assert stop.hurries
        assert not isinstance(at_once.value, StopAsked)
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize(("grace_s", "left_s"), [(90.0, 80.0), (30.0, 20.0), (6.0, 4.0)])
def test_goodbyes_have_ten_seconds_of_the_grace_or_a_third(grace_s: float, left_s: float) -> None:
    stop = CleanStop(grace_s)
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
        assert stop.left_s == pytest.approx(left_s, abs=0.5)


def test_a_step_that_outlasts_the_grace_is_broken_off() -> None:
    stop, began = CleanStop(0.3), time.monotonic()
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            time.sleep(5)
    assert 0.1 < time.monotonic() - began < 2
    assert stop.hurries


def test_a_checkpoint_that_is_written_ends_the_deadline() -> None:
    stop = CleanStop(0.3)
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
        stop.over()
        time.sleep(0.4)
    assert not stop.hurries


@pytest.mark.parametrize(("step", "saved"), [(0, 0), (3, 3), (3, 2)])
def test_a_checkpoint_is_announced_where_one_is_written(
    caplog: pytest.LogCaptureFixture, step: int, saved: int
) -> None:
    written: list[bool] = []
    saver: Any = SimpleNamespace(saved_step=saved, save=lambda: written.append(True), finish=lambda: None)
    said: list[str] = []
    schedule: Any = SimpleNamespace(
        progress=SimpleNamespace(step=step),
        status=lambda *words: said.extend(words),
        finish_evaluation=lambda **_: None,
    )
    caplog.set_level(logging.INFO)
    parts: Any = SimpleNamespace(is_lent=False)
    CleanStop(30.0).save(saver, schedule, parts, parts)
    is_due = step > saved
    assert bool(written) == is_due
    assert ("checkpoint is written within" in caplog.text) == is_due
    assert said == ["stopping", f"the checkpoint of step {step}" if is_due else ""]
    assert step or f"stopping after step {step}: there is nothing to save" in caplog.text


@pytest.mark.parametrize("arrived", [3, 8])
def test_an_evaluation_of_an_earlier_step_is_given_up_where_time_runs_out(arrived: int) -> None:
    """It would be waited for without an end; the checkpoint of a later step is worth more."""
    running = SimpleNamespace(step=4, arrived=arrived, rows=8, is_complete=arrived == 8)
    recorded: list[int] = []
    schedule: Any = SimpleNamespace(
        ledger=SimpleNamespace(evaluation=running),
        device=SimpleNamespace(lend=lambda: None),
        _wait_for_evaluation=lambda is_over: pytest.fail("it would wait") if not is_over() else None,
        _record_if_complete=lambda: recorded.extend([running.step] if running.is_complete else []),
    )
    StepSchedule.finish_evaluation(schedule, before_step=5, gives_up=lambda: True)
    assert recorded == ([4] if arrived == 8 else [])
