"""Where a report draws lines that no alert has."""

from __future__ import annotations

SERVERS_IDLE = 0.8
TRUNCATED = 0.25
ZERO_VARIANCE = 0.5
RESTARTS = 3
