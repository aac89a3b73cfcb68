"""The history that later turns of a played episode see: as the configuration's rule or the environment rewrites it."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.config.environment import EnvironmentConfig
from asyncrl.environments.observation import (
    THINKING_BEGINS,
    THINKING_ENDS,
    Observation,
    PastTurn,
    check_history,
    images_left_out,
    without_images,
)

Past = tuple[str, Observation]
"""A turn that a later one sees, and what was shown behind it."""
_NOTHING = Observation(())


class PlayedHistory:
    """History of an episode in words, as later turns see it; tokens and their boundaries in a text are known to a run
    alone.

    As `asyncrl.processing.history.History` does for a run; the newest turn's observation is not in it.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._said: list[Past] = []
        """All turns by their number."""
        self._turns: list[Past] = []
        """Turns that later turns see, as the environment has them."""
        self._seen: list[Past] = []
        """The segment that the last turn was taken in, with that turn."""

    def follow(self, text: str, observation: Observation, edited: Sequence[PastTurn]) -> tuple[Past, ...]:
        """The history that the next turn sees before `observation`, where a new segment begins with it; empty where the
        segment only grows. Raises UserError for an edited history that cannot be."""
        self._said.append((text, _NOTHING))
        self._seen.append((text, _NOTHING))
        turns = [*self._turns, (text, _NOTHING)]
        if edited:
            shown = [each for _, each in self._said]
            check_history(edited, shown, {image for each in shown for image in each.images})
            turns = [self._edited(past) for past in edited]
        *before, (last, _) = turns
        left_out = images_left_out([each for _, each in before], observation, self._config.keep_images)
        rewritten: list[Past] = []
        for said, each in before:
            gone = min(left_out, len(each.images))
            left_out -= gone
            rewritten.append((self._as_context(said), without_images(each, gone)))
        rewritten.append((self._as_context(last), _NOTHING))
        begins_segment = rewritten != self._seen
        if begins_segment:
            self._seen = rewritten[:]
        for row in (self._said, self._seen):
            row[-1] = (row[-1][0], observation)
        self._turns = [*before, (last, observation)]
        return tuple(rewritten) if begins_segment else ()

    def _edited(self, past: PastTurn) -> Past:
        text, shown = (past.text, _NOTHING) if past.turn is None else self._said[past.turn]
        return text, shown if past.shown is None else past.shown

    def _as_context(self, text: str) -> str:
        begun, tag, rest = text.rpartition(THINKING_ENDS)
        if self._config.history != "strip_thinking" or not tag:
            return text
        return rest.lstrip() if THINKING_BEGINS in begun else tag + rest
