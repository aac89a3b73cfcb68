"""What a terminal can show: the panel's own signs, and text that somebody else wrote, made harmless and cut to size."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len, chop_cells, set_cell_size

from asyncrl.telemetry.escape import code_of


@dataclass(frozen=True)
class Glyphs:
    encoding: str
    bars: str
    arrow: str
    ellipsis: str

    @classmethod
    def of(cls, encoding: str) -> Glyphs:
        """Those of an output stream; ASCII where it has not all of ours."""
        signs = ("▁▂▃▄▅▆▇█", "→", "…")
        try:
            "".join(signs).encode(encoding)
        except UnicodeEncodeError:
            signs = ("_.-=+*#@", "->", "...")
        return cls(encoding, *signs)

    def line(self, text: object) -> str:
        """One line. What is not printable here is shown, not sent: a model may write escape sequences."""
        return "".join(c if self._can_show(c) else code_of(c) for c in " ".join(str(text).split()))

    def _can_show(self, character: str) -> bool:
        if not character.isprintable():
            return False
        try:
            character.encode(self.encoding)
        except UnicodeEncodeError:
            return False
        return True

    def cut(self, text: object, cells: int) -> str:
        """One line of at most so many cells; a wide character takes two."""
        line = self.line(text)
        if cell_len(line) <= cells:
            return line
        return set_cell_size(line, max(0, cells - len(self.ellipsis))).rstrip() + self.ellipsis

    def lines(self, text: object, cells: int, limit: int) -> list[str]:
        """The beginning of the text in at most `limit` such lines."""
        whole = self.line(text)
        parts = chop_cells(whole, max(1, cells))
        if len(parts) <= limit:
            return parts or [""]
        return [*parts[: limit - 1], self.cut("".join(parts[limit - 1 :]), cells)]

    def sparkline(self, values: list[float]) -> str:
        """From the lowest to the highest value."""
        if not values:
            return ""
        low, span = min(values), max(max(values) - min(values), 1e-9)
        return "".join(self.bars[round((value - low) / span * (len(self.bars) - 1))] for value in values)


def slice_means(values: list[float], count: int) -> list[float]:
    """The whole course in `count` numbers: means of equal slices."""
    count = min(count, len(values))
    slices = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    return [sum(part) / len(part) for part in slices]
