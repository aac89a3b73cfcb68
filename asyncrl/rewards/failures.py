"""Words an exception in one bounded line that names the place in the user's file."""

from __future__ import annotations

import traceback
from pathlib import Path

MAX_MESSAGE_CHARS = 600


def shorten(text: str, limit: int = MAX_MESSAGE_CHARS) -> str:
    return text if len(text) <= limit else f"{text[: limit - 20]}... ({len(text)} chars)"


def one_line(error: BaseException, own_file: str = "") -> str:
    """`ZeroDivisionError: division by zero (my_reward.py:12 in reward)`.

    own_file is the user's file: where the error was raised deeper down, its last line there is named too.
    """
    try:
        text = " ".join(str(error).split())
    except Exception as broken:  # an exception class of the user whose __str__ fails
        text = f"(its own text failed with {type(broken).__name__})"
    name = type(error).__name__
    said = shorten(f"{name}: {text}" if text else name, MAX_MESSAGE_CHARS // 2)
    place = _place(error, own_file)
    return f"{said} ({place})" if place else said


def _place(error: BaseException, own_file: str) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    # Plain tuples: no frame may live on, as after a MemoryError its locals must go.
    walked = traceback.walk_tb(error.__traceback__)
    frames = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walked]
    if not frames:
        return ""
    own = [frame for frame in frames if own_file and frame[0] == own_file]
    last = frames[-1]
    if own and own[-1] != last:
        return shorten(f"{_show(own[-1])}, raised in {_show(last)}", MAX_MESSAGE_CHARS // 2)
    return shorten(_show(last), MAX_MESSAGE_CHARS // 2)


def _show(frame: tuple[str, int | None, str]) -> str:
    filename, line, function = frame
    where = f"{Path(filename).name}:{line}"
    return where if function == "<module>" else f"{where} in {function}"
