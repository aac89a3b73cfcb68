"""A service's log is bounded: a line of the source that repeats itself is counted."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from asyncrl.telemetry.logs import LINES_PER_WINDOW, WINDOW_S, RepeatLimitingHandler, quiet_deepspeed


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def said(clock: Clock) -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def logger(clock: Clock, said: io.StringIO) -> Iterator[logging.Logger]:
    logger = logging.getLogger("tests.logs")
    handler = RepeatLimitingHandler(said, clock)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield logger
    logger.removeHandler(handler)


def complain(logger: logging.Logger, count: int) -> None:
    for number in range(count):
        logger.warning("peer %d sent %s", number, "x" * 100)


def test_a_line_that_repeats_itself_is_counted(logger: logging.Logger, said: io.StringIO, clock: Clock) -> None:
    complain(logger, 2000)
    assert said.getvalue().count("\n") == LINES_PER_WINDOW
    logger.info("step 1")
    assert said.getvalue().endswith("step 1\n"), "others are not held back"
    clock.now += WINDOW_S + 2
    logger.info("step 2")
    *_, counted, step = said.getvalue().splitlines()
    assert counted.startswith("repeated 1,980 times in 12 s, the last time: peer 1999 sent xxx")
    assert step == "step 2"
    complain(logger, 1)
    assert said.getvalue().splitlines()[-1].startswith("peer 0 sent"), "a new window has begun"


def test_the_count_is_said_at_the_end_of_the_process(logger: logging.Logger, said: io.StringIO) -> None:
    complain(logger, LINES_PER_WINDOW + 1)
    logger.handlers[0].close()
    assert "repeated 1 time in" in said.getvalue()


SERVICE = """
import logging
from asyncrl import process_end, service_entry
service_entry.configure_logging("learner")
for number in range(1000):
    logging.warning("peer %d is refused", number)
service_entry._print_error("the disk is full")
process_end.leave(3)
"""


def test_a_service_limits_its_log_and_says_last_why_it_ended() -> None:
    done = subprocess.run([sys.executable, "-c", SERVICE], capture_output=True, text=True, timeout=30)
    *said, counted, last = done.stderr.splitlines()
    assert (done.returncode, len(said)) == (3, LINES_PER_WINDOW)
    assert f"repeated {1000 - LINES_PER_WINDOW} times in" in counted
    assert last == "error: the disk is full", "which a launcher looks for at the end"


def test_who_asks_for_debug_gets_all(logger: logging.Logger, said: io.StringIO) -> None:
    for number in range(100):
        logger.debug("acknowledged %d", number)
    assert said.getvalue().count("\n") == 100


def test_deepspeed_does_not_say_that_there_is_no_gpu(said: io.StringIO, clock: Clock) -> None:
    """transformers imports DeepSpeed where it is installed, whatever a command does."""
    quiet_deepspeed()
    deepspeed, handler = logging.getLogger("DeepSpeed"), RepeatLimitingHandler(said, clock)
    deepspeed.addHandler(handler)
    try:
        deepspeed.warning("Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to ...")
        deepspeed.warning("overflow in step %d", 3)
    finally:
        deepspeed.removeHandler(handler)
    assert said.getvalue() == "overflow in step 3\n"
