"""One thing that is wrong with a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["critical", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    level: Level
    what: str
    value: str
    advice: str
