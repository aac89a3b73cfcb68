"""Numbers and times as people read them."""

from __future__ import annotations

import time
from typing import Any

from asyncrl.tools.panel.run_snapshot import Story

MISSING = "-"


def number(value: Any, digits: int = 3) -> str:
    return MISSING if value is None else f"{value:z.{digits}f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return MISSING
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def time_left(story: Story) -> str:
    """`12 min 05 s left, 18:42`; the day, too, where it is another one. Empty where it is not known. Of a run that has
    ended how, and after how long: `finished after 2 h 05 min`.
    """
    if story.has_ended:
        taken = story.seconds_taken()
        return story.phase if taken is None else f"{story.phase} after {duration(taken)}"
    left = story.seconds_left()
    if not left:
        return ""
    now = time.time()
    today, then = time.localtime(now), time.localtime(now + left)
    clock = time.strftime("%H:%M" if then.tm_yday == today.tm_yday else "%a %H:%M", then)
    return f"{duration(left)} left, {clock}"
