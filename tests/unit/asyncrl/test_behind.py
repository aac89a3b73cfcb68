"""Work behind its caller: in order, bounded, and not silent about what goes wrong."""

from __future__ import annotations

import threading
import time

import pytest

from asyncrl.telemetry import background_writer as behind
from asyncrl.telemetry.background_writer import MAX_WAITING, BackgroundWriter


def test_work_is_done_in_order_and_elsewhere() -> None:
    done: list[tuple[int, int]] = []
    worker = BackgroundWriter("test")
    for number in range(50):
        worker.do(lambda number: done.append((number, threading.get_ident())), number)
    worker.wait()
    assert [number for number, _ in done] == list(range(50))
    assert {thread for _, thread in done} != {threading.get_ident()}
    worker.close()


def test_a_caller_that_is_too_fast_waits() -> None:
    worker, go = BackgroundWriter("test"), threading.Event()
    for _ in range(MAX_WAITING):
        worker.do(go.wait, 30)
    late = threading.Thread(target=worker.do, args=(int,))
    late.start()
    late.join(0.2)
    assert late.is_alive()
    go.set()
    late.join(10)
    assert not late.is_alive()
    worker.close()


def test_what_goes_wrong_is_raised_by_the_next_call() -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    worker = BackgroundWriter("test")
    worker.do(fail)
    time.sleep(0.1)
    with pytest.raises(OSError, match="No space"):
        worker.do(int)
    worker.do(fail)
    with pytest.raises(OSError, match="No space"):
        worker.close()


def test_no_wait_is_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "DEADLINE_S", 0.1)
    worker, go = BackgroundWriter("samples"), threading.Event()
    worker.do(go.wait, 30)
    with pytest.raises(OSError, match=r"samples could not be written within 0\.1 s"):
        worker.wait()
    go.set()
    worker.close()
