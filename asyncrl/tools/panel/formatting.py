"""Text for a terminal: numbers, durations, the panel's own signs, and untrusted text, made harmless and cut to size."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, chop_cells, set_cell_size

from asyncrl.tools.panel.run_snapshot import RunSnapshot

MISSING = "-"


def number(value: Any, digits: int = 3) -> str:
    return MISSING if value is None else f"{value:z.{digits}f}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


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


@dataclass(frozen=True)
class Glyphs:
    """Signs and text in the encoding of an output stream."""

    encoding: str
    bars: str
    arrow: str
    ellipsis: str

    @classmethod
    def of(cls, encoding: str) -> Glyphs:
        """The panel's signs, or ASCII ones where the encoding lacks some of them."""
        signs = ("▁▂▃▄▅▆▇█", "→", "…")
        return cls(encoding, *(signs if _encodes("".join(signs), encoding) else ("_.-=+*#@", "->", "...")))

    def line(self, text: object) -> str:
        """The text on one line. Characters that cannot be printed show as codes: a model may write escape sequences."""
        return "".join(
            c if c.isprintable() and _encodes(c, self.encoding) else c.encode("unicode_escape").decode()
            for c in " ".join(str(text).split())
        )

    def cut(self, text: object, cells: int) -> str:
        """The text on one line of at most so many cells; a wide character takes two."""
        line = self.line(text)
        if cell_len(line) <= cells:
            return line
        return set_cell_size(line, max(0, cells - len(self.ellipsis))).rstrip() + self.ellipsis

    def lines(self, text: object, cells: int, limit: int) -> list[str]:
        """The beginning of the text in at most `limit` such lines."""
        parts = chop_cells(self.line(text), max(1, cells))
        if len(parts) <= limit:
            return parts or [""]
        return [*parts[: limit - 1], self.cut("".join(parts[limit - 1 :]), cells)]

    def sparkline(self, values: list[float]) -> str:
        """Bars from the lowest to the highest value."""
        if not values:
            return ""
        low, span = min(values), max(max(values) - min(values), 1e-9)
        return "".join(self.bars[round((value - low) / span * (len(self.bars) - 1))] for value in values)


def _encodes(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def slice_means(values: list[float], count: int) -> list[float]:
    """All values in `count` numbers: means of equal slices."""
    count = min(count, len(values))
    slices = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    return [sum(part) / len(part) for part in slices]
