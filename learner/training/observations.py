"""Observations of an environment as the model sees them in training: images in the middle of a trajectory."""

from __future__ import annotations

from asyncrl.environments.recording import images_of, observation_of
from asyncrl.models.processing import EncodedPrompt
from asyncrl.models.rows import joined_row, sampled_piece
from learner.tickets.ticket import ReceivedGroup


def observed_row(item: ReceivedGroup, index: int) -> EncodedPrompt | None:
    """The tokens of completion `index` with the images that it was shown; None where all of it is text.

    Its bridges are made again, with pixels, of the messages and bytes that the group records: no environment is asked.
    What was made lately waits in the processor's cache. The group is verified.
    """
    turns, bridge = item.group.trajectories[index].turns, item.prepared.bridge
    if bridge is None or not any(images_of(turn.observation) for turn in turns):
        return None
    token_ids = item.group.token_ids[item.group.span(index)]
    pieces: list[EncodedPrompt] = []
    for turn in turns:
        pieces.append(sampled_piece(token_ids[turn.start : turn.end]))
        if turn.observation:
            shown = observation_of(turn.observation, item.group.blobs)
            pieces.append(bridge.encode(int(token_ids[turn.end - 1]), shown))
    return joined_row(pieces[0], pieces[1:])
