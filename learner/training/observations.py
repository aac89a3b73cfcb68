"""Observations of an environment as the model sees them in training: images in the middle of a trajectory."""

from __future__ import annotations

from itertools import pairwise

from asyncrl.environments.recording import history_of, images_of, observation_of
from asyncrl.processing.history import History
from asyncrl.processing.model_inputs import joined_row
from learner.groups.ticket import ReceivedGroup
from learner.training.packing import Segment


def segments_of(item: ReceivedGroup, index: int) -> tuple[Segment, ...]:
    """The segments of completion `index`, with the images that it was shown in each.

    Its bridges are made again, with pixels, of the messages and bytes that the group records: no environment is asked.
    What was made lately waits in the processor's cache. The group is verified.
    """
    bridge, rule = item.prepared.bridge, item.ticket.conversation
    if bridge is None or rule is None:
        return (Segment(),)  # a single turn
    record = item.group.trajectories[index]
    turns, starts = record.turns, record.segment_starts
    if not any(images_of(turn.observation) for turn in turns):
        return tuple(map(Segment, starts))
    token_ids = item.group.token_ids[item.group.span(index)]
    history, segments = History(bridge, rule, pixels=True), list[Segment]()

    def end_segment() -> None:
        row = joined_row(history.pieces[0], history.pieces[1:])
        segments.append(Segment(starts[len(segments)], row if len(row.image_hashes) else None))

    for turn, following in pairwise(turns):
        history.add_turn(token_ids[turn.start : turn.end])
        if following.context:
            end_segment()
        observation = observation_of(turn.observation, item.group.blobs)
        edited = history_of(turn.history, item.group.blobs)
        history.show(observation, history.after(observation, edited))
    history.add_turn(token_ids[turns[-1].start : turns[-1].end])
    end_segment()
    return tuple(segments)
