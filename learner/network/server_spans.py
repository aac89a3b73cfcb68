"""What servers did, from what they say of it: the messages that carry seconds become spans of the timeline."""

from __future__ import annotations

from asyncrl.telemetry.timeline import Timeline
from protocol.messages import Group, LeaseReturn, Message, WeightsLoaded


def note(timeline: Timeline, server_id: str, message: Message) -> None:
    """A message that has just come; most say nothing of time."""
    if isinstance(message, Group):
        timeline.ended(server_id, "generating", message.timings.generate_s, ago_s=message.timings.reward_s)
        timeline.ended(server_id, "scoring", message.timings.reward_s)
    elif isinstance(message, WeightsLoaded):
        timeline.ended(server_id, "loading", message.transfer_s + message.load_s, version=message.version)
    elif isinstance(message, LeaseReturn):
        timeline.ended(server_id, "falling asleep", message.sleep_s, wake_s=round(message.wake_s, 3))
