"""Text for a terminal: numbers, durations, sparklines, and untrusted text, made harmless and cut to size."""

from __future__ import annotations

import time

from rich.cells import cell_len, chop_cells, set_cell_size

from asyncrl.launch.display import one_line
from asyncrl_plugins.viewer.numbers import duration
from asyncrl_plugins.viewer.panel.run_snapshot import RunSnapshot

BARS = "▁▂▃▄▅▆▇█"


def time_left(run: RunSnapshot) -> str:
    """`12 min 05 s left, 18:42`; with the weekday where the end is on another day. Empty where it is unknown.

    For a run that has ended: `finished after 2 h 05 min`.
    """
    if run.has_ended:
        taken = run.seconds_taken()
        return run.phase if taken is None else f"{run.phase} after {duration(taken)}"
    left = run.seconds_left()
    if not left:
        return ""
    now = time.time()
    today, then = time.localtime(now), time.localtime(now + left)
    clock = time.strftime("%H:%M" if then.tm_yday == today.tm_yday else "%a %H:%M", then)
    return f"{duration(left)} left, {clock}"


def cut(text: object, cells: int) -> str:
    """The text on one line of at most so many cells; a wide character takes two."""
    line = one_line(text)
    return line if cell_len(line) <= cells else set_cell_size(line, max(0, cells - 1)).rstrip() + "…"


def cut_lines(text: object, cells: int, limit: int) -> list[str]:
    """The beginning of the text in at most `limit` such lines."""
    parts = chop_cells(one_line(text), max(1, cells))
    if len(parts) <= limit:
        return parts or [""]
    return [*parts[: limit - 1], cut("".join(parts[limit - 1 :]), cells)]


def sparkline(values: list[float]) -> str:
    """Bars from the lowest to the highest value."""
    if not values:
        return ""
    low, span = min(values), max(max(values) - min(values), 1e-9)
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in values)


def slice_means(values: list[float], count: int) -> list[float]:
    """All values in `count` numbers: means of equal slices."""
    count = min(count, len(values))
    slices = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    return [sum(part) / len(part) for part in slices]
